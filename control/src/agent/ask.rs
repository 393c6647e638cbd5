//! Views that take arguments.

use std::collections::BTreeMap;
use std::net::IpAddr;

use skein_cni::agent::{AgentError, Reply};

use super::Agent;
use super::report::document;
use crate::connections::{self, Filter, What};
use crate::endpoint::{agent_error, code};
use crate::flows::Question;
use crate::state::PodKey;

impl Agent {
    pub(super) fn ask(
        &mut self,
        name: &str,
        arguments: &BTreeMap<String, String>,
    ) -> Result<Reply, AgentError> {
        let refused = |error: String| agent_error(code::REFUSED, error, "");
        match name {
            "conntrack" => {
                let what = arguments.get("do").map_or("list", String::as_str);
                let what = What::read(what).map_err(refused)?;
                let mut filter = Filter::read(arguments).map_err(refused)?;
                if let Some(pod) = arguments.get("pod") {
                    filter.addresses = Some(self.addresses_of(pod).map_err(refused)?);
                }
                let shared = self.datapath.shared();
                document(&connections::view(shared, &filter, what))
            }
            "flows" => {
                let question = Question::read(arguments).map_err(refused)?;
                let lost = self.hear_of_flows();
                let mut view = (self.history).view(&question, self.datapath.tables(), &self.state);
                view.lost = lost;
                document(&view)
            }
            "trace" => document(&self.trace(arguments).map_err(refused)?),
            _ => self.view(name),
        }
    }

    /// The connection table in numbers, for metrics.
    pub(super) fn connection_gauges(
        &self,
    ) -> impl Iterator<Item = (&'static str, (&'static str, i64))> {
        let gauges = connections::gauges(self.datapath.shared()).into_iter();
        gauges.map(|(name, help, value)| (name, (help, i64::try_from(value).unwrap_or(i64::MAX))))
    }

    /// The addresses of a pod that is named `namespace/name`.
    pub(super) fn addresses_of(&self, pod: &str) -> Result<Vec<IpAddr>, String> {
        let (namespace, name) = pod.split_once('/').unwrap_or(("default", pod));
        let of_pod = |namespace: &str, name: &str| {
            let key = PodKey {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            };
            self.state.pod(&key).map(|pod| pod.ips.clone())
        };
        let here = self.state.endpoints().find(|endpoint| {
            (endpoint.pod.as_ref())
                .is_some_and(|pod| pod.namespace == namespace && pod.name == name)
        });
        here.map(|endpoint| endpoint.ips.clone())
            .or_else(|| of_pod(namespace, name))
            .ok_or_else(|| format!("there is no pod {namespace}/{name}"))
    }
}
