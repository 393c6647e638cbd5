//! What to undo when a command fails midway.
//!
//! Each step that changes something pushes its reverse. On failure they run from the last to
//! the first; one that fails does not stop the others.

/// One reverse step: what it is, and how it is done.
struct Step<'a> {
    what: String,
    run: Box<dyn FnOnce() -> Result<(), String> + 'a>,
}

/// A stack of reverse steps. Dropped before [`Undo::commit`], it runs them, so that a panic
/// leaves nothing behind either.
#[derive(Default)]
pub struct Undo<'a> {
    steps: Vec<Step<'a>>,
}

impl<'a> Undo<'a> {
    /// An empty stack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the reverse of the step just done.
    pub fn push<E: ToString>(
        &mut self,
        what: impl Into<String>,
        run: impl FnOnce() -> Result<(), E> + 'a,
    ) {
        self.steps.push(Step {
            what: what.into(),
            run: Box::new(|| run().map_err(|e| e.to_string())),
        });
    }

    /// All went well: nothing is to be undone.
    pub fn commit(mut self) {
        self.steps.clear();
    }

    /// Undoes everything, last step first; returns what failed, in that order.
    pub fn run(mut self) -> Vec<String> {
        self.unwind()
    }

    fn unwind(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        while let Some(step) = self.steps.pop() {
            if let Err(error) = (step.run)() {
                failures.push(format!("undoing failed: {}: {error}", step.what));
            }
        }
        failures
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        self.unwind();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn steps_run_backwards_and_failures_are_collected() {
        let order = RefCell::new(Vec::new());
        let step = |number, result: Result<(), &'static str>| {
            let order = &order;
            move || {
                order.borrow_mut().push(number);
                result
            }
        };
        let mut undo = Undo::new();
        undo.push("first", step(1, Ok(())));
        undo.push("second", step(2, Err("busy")));
        undo.push("third", step(3, Ok(())));
        assert_eq!(undo.run(), ["undoing failed: second: busy"]);
        assert_eq!(*order.borrow(), [3, 2, 1]);
    }

    #[test]
    fn a_commit_undoes_nothing_and_a_drop_everything() {
        let done = RefCell::new(0);
        let count = || -> Result<(), String> {
            *done.borrow_mut() += 1;
            Ok(())
        };
        let mut committed = Undo::new();
        committed.push("step", count);
        committed.commit();
        assert_eq!(*done.borrow(), 0);
        let mut dropped = Undo::new();
        dropped.push("step", count);
        drop(dropped);
        assert_eq!(*done.borrow(), 1);
    }
}
