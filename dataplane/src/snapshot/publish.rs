//! Hands publications to workers and frees them once nobody reads them.
//!
//! Each worker has a mailbox of one letter: the publisher puts the newest tables in (and takes
//! back a letter that was not fetched), the worker looks once a batch. The publisher keeps what
//! it published until every worker has acknowledged something newer, so the memory of old
//! tables is always freed here, never on a packet's path.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use super::Snapshot;
use crate::ids::Generation;

#[derive(Debug)]
struct Mailbox {
    letter: ArrayQueue<Arc<Snapshot>>,
    seen: AtomicU64,
}

/// Publishes tables; there is one, and it is not cloned.
#[derive(Debug)]
pub struct Publisher {
    /// The newest last; all that some worker may still read.
    alive: VecDeque<Arc<Snapshot>>,
    mailboxes: Vec<Arc<Mailbox>>,
}

impl Publisher {
    /// A publisher whose current tables are these.
    #[must_use]
    pub fn new(first: Snapshot) -> Self {
        Self {
            alive: VecDeque::from([Arc::new(first)]),
            mailboxes: Vec::new(),
        }
    }

    /// A reader for one more worker; it starts with the current tables.
    #[must_use]
    pub fn reader(&mut self) -> Reader {
        let current = self.newest().clone();
        let mailbox = Arc::new(Mailbox {
            letter: ArrayQueue::new(1),
            seen: AtomicU64::new(current.generation().0),
        });
        self.mailboxes.push(mailbox.clone());
        Reader { mailbox, current }
    }

    /// The tables published last.
    #[must_use]
    pub fn current(&self) -> &Snapshot {
        self.newest()
    }

    /// Publishes tables, newer than the current ones. Workers see them at their next batch; a
    /// sleeping worker must be woken by the caller.
    pub fn publish(&mut self, tables: Snapshot) {
        assert!(
            tables.generation() > self.newest().generation(),
            "generations go up"
        );
        let tables = Arc::new(tables);
        for mailbox in &self.mailboxes {
            mailbox.letter.force_push(tables.clone());
        }
        self.alive.push_back(tables);
        self.reclaim();
    }

    /// The generation that every worker has acknowledged: none uses an older one any more.
    #[must_use]
    pub fn acknowledged(&self) -> Generation {
        self.mailboxes
            .iter()
            .map(|mailbox| Generation(mailbox.seen.load(Ordering::Acquire)))
            .min()
            .unwrap_or(self.newest().generation())
    }

    /// Frees the tables that no worker reads any more; returns how many publications stay.
    pub fn reclaim(&mut self) -> usize {
        let acknowledged = self.acknowledged();
        while self.alive.len() > 1 && self.alive[0].generation() < acknowledged {
            self.alive.pop_front();
        }
        self.alive.len()
    }

    fn newest(&self) -> &Arc<Snapshot> {
        self.alive
            .back()
            .expect("the current tables are always alive")
    }
}

/// A worker's view of the tables.
#[derive(Debug)]
pub struct Reader {
    mailbox: Arc<Mailbox>,
    current: Arc<Snapshot>,
}

impl Reader {
    /// Takes newer tables if there are any, and acknowledges them: called between batches.
    pub fn refresh(&mut self) -> bool {
        let Some(newer) = self.mailbox.letter.pop() else {
            return false;
        };
        // The publisher still holds the old tables, so this frees nothing.
        self.current = newer;
        self.mailbox
            .seen
            .store(self.current.generation().0, Ordering::Release);
        true
    }

    /// Whether newer tables wait.
    #[must_use]
    pub fn outdated(&self) -> bool {
        !self.mailbox.letter.is_empty()
    }

    /// The tables of this batch.
    #[must_use]
    pub fn tables(&self) -> &Snapshot {
        &self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::node;
    use crate::snapshot::SnapshotBuilder;

    fn next(publisher: &Publisher) -> Snapshot {
        SnapshotBuilder::new(publisher.current()).finish()
    }

    #[test]
    fn old_tables_stay_until_every_worker_has_newer_ones() {
        let mut publisher = Publisher::new(Snapshot::empty(node(1)));
        let mut fast = publisher.reader();
        let mut slow = publisher.reader();
        for _ in 0..3 {
            let tables = next(&publisher);
            publisher.publish(tables);
            fast.refresh();
        }
        assert_eq!(publisher.acknowledged(), Generation(0));
        assert_eq!(publisher.reclaim(), 4);
        assert!(slow.refresh());
        assert_eq!(slow.tables().generation(), Generation(3));
        assert!(!slow.refresh());
        assert_eq!(publisher.acknowledged(), Generation(3));
        assert_eq!(publisher.reclaim(), 1);
    }

    #[test]
    fn the_publisher_frees_last() {
        let mut publisher = Publisher::new(Snapshot::empty(node(1)));
        let mut reader = publisher.reader();
        let old = Arc::downgrade(&reader.current);
        let tables = next(&publisher);
        publisher.publish(tables);
        reader.refresh();
        assert!(old.upgrade().is_some(), "freed by the worker");
        publisher.reclaim();
        assert!(old.upgrade().is_none(), "never freed");
    }
}
