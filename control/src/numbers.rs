//! Numbers that workers know things by.

use std::collections::VecDeque;

use skein_dataplane::ids::{Generation, LinkId};

/// Link numbers: dense, since workers index by them, and reused only once every worker has
/// acknowledged tables without the link.
#[derive(Debug, Default)]
pub struct LinkNumbers {
    next: u32,
    /// Given back, with the first generation that does without.
    free: VecDeque<(Generation, LinkId)>,
}

impl LinkNumbers {
    /// A number that no worker knows; `acknowledged` is the generation that all have.
    pub fn take(&mut self, acknowledged: Generation) -> LinkId {
        if let Some(&(generation, id)) = self.free.front()
            && generation <= acknowledged
        {
            self.free.pop_front();
            return id;
        }
        let id = LinkId(self.next);
        self.next += 1;
        id
    }

    /// Gives a number back; `without` is the first generation of tables that does without it.
    pub fn give(&mut self, id: LinkId, without: Generation) {
        self.free.push_back((without, id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_rests_until_all_have_let_go_of_it() {
        let mut numbers = LinkNumbers::default();
        assert_eq!(numbers.take(Generation(0)), LinkId(0));
        numbers.give(LinkId(0), Generation(5));
        assert_eq!(numbers.take(Generation(4)), LinkId(1));
        assert_eq!(numbers.take(Generation(5)), LinkId(0));
        assert_eq!(numbers.take(Generation(5)), LinkId(2));
    }
}
