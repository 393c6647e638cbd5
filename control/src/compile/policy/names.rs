//! What the numbers of rules mean: each verdict names its rule.

use std::collections::BTreeMap;
use std::fmt;

use skein_dataplane::policy::Side;
use skein_dataplane::snapshot::RuleId;

use crate::policy::{NetworkPolicy, PolicyKey};

/// A rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleName {
    /// The policy.
    pub policy: PolicyKey,
    /// Which of its lists of rules.
    pub side: Side,
    /// The place in that list, counted from zero.
    pub index: usize,
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = match self.side {
            Side::Ingress => "ingress",
            Side::Egress => "egress",
        };
        write!(f, "{} spec.{list}[{}]", self.policy, self.index)
    }
}

/// Numbers of rules and their names. A rule keeps its number while its policy lasts, and no
/// number is used again, so that an event from before never names another rule.
#[derive(Debug, Default)]
pub(super) struct RuleNames {
    by_name: BTreeMap<RuleName, RuleId>,
    by_id: BTreeMap<RuleId, RuleName>,
    next: u32,
}

impl RuleNames {
    pub(super) fn name(&self, id: RuleId) -> Option<&RuleName> {
        self.by_id.get(&id)
    }

    pub(super) fn id(&self, name: &RuleName) -> Option<RuleId> {
        self.by_name.get(name).copied()
    }

    /// Names what a policy has now; what it had before and has no more is forgotten.
    pub(super) fn set(&mut self, key: &PolicyKey, policy: Option<&NetworkPolicy>) {
        for side in [Side::Ingress, Side::Egress] {
            let rules = policy
                .and_then(|policy| policy.rules(side))
                .unwrap_or_default();
            let name = |index| RuleName {
                policy: key.clone(),
                side,
                index,
            };
            for index in 0..rules.len() {
                if !self.by_name.contains_key(&name(index)) {
                    let id = RuleId(self.next);
                    self.next += 1;
                    self.by_name.insert(name(index), id);
                    self.by_id.insert(id, name(index));
                }
            }
            // They are numbered from zero without a gap.
            for index in rules.len().. {
                let Some(id) = self.by_name.remove(&name(index)) else {
                    break;
                };
                self.by_id.remove(&id);
            }
        }
    }
}
