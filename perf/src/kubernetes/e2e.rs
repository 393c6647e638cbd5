//! The Kubernetes project's own end-to-end tests, and what they found.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ClusterRecord;
use crate::cmd::{Cmd, Output};
use crate::report;

/// How one spec ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its full name.
    pub name: String,
    /// `passed`, `failed`, `timedout`, `panicked` and so on, as Ginkgo says.
    pub state: String,
    /// Why it failed; empty if it passed.
    pub message: String,
    /// How long it ran.
    pub time: Duration,
}

impl Spec {
    /// Whether it passed.
    pub fn passed(&self) -> bool {
        self.state == "passed"
    }
}

/// Which specs to run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// A regular expression; a spec runs whose name matches it.
    pub focus: String,
    /// A regular expression; a spec whose name matches does not run. Empty: none.
    pub skip: String,
}

/// The command that runs the selected specs and writes Ginkgo's report to `report`.
///
/// # Errors
/// If the cluster's record is incomplete.
pub fn command(cluster: &ClusterRecord, selection: &Selection, report: &Path) -> Result<Cmd> {
    // What a spec hangs on shows in its own time limits; this only ends what does not end.
    Ok(cluster
        .in_network(cluster.programs().path("e2e.test"))?
        .args([
            "--provider=local",
            "--ginkgo.no-color",
            "--ginkgo.timeout=12h",
        ])
        .arg(format!("--kubeconfig={}", cluster.admin.display()))
        .arg(format!(
            "--kubectl-path={}",
            cluster.programs().path("kubectl").display()
        ))
        .arg(format!("--num-nodes={}", cluster.workers))
        .arg(format!("--ginkgo.focus={}", selection.focus))
        .arg(format!("--ginkgo.skip={}", selection.skip))
        .arg(format!("--ginkgo.json-report={}", report.display())))
}

/// Runs the selected specs to the end, output captured; a spec that fails is no error.
///
/// # Errors
/// If the tests cannot run, select nothing, or run for longer than `timeout`.
pub fn run(
    cluster: &ClusterRecord,
    selection: &Selection,
    timeout: Duration,
) -> Result<(Vec<Spec>, Output)> {
    let report = cluster.directory.join("e2e.json");
    drop(std::fs::remove_file(&report));
    let output = command(cluster, selection, &report)?
        .timeout(timeout)
        .try_run()?;
    let specs = read(&report).with_context(|| format!("e2e.test: {}", output.describe()))?;
    Ok((specs, output))
}

/// Reads Ginkgo's JSON report: the specs that ran, in their order.
///
/// # Errors
/// If there is no report, or no spec in it ran.
pub fn read(report: &Path) -> Result<Vec<Spec>> {
    let text = std::fs::read_to_string(report)
        .with_context(|| format!("the tests left no report {}", report.display()))?;
    let suites: Value = serde_json::from_str(&text).context("the tests' report is no JSON")?;
    let specs: Vec<Spec> = suites
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten())
        .filter_map(spec)
        .collect();
    ensure!(!specs.is_empty(), "the focus selected no spec that ran");
    Ok(specs)
}

/// A spec that ran; also a failed set-up of the whole suite, which has no name of its own.
fn spec(report: &Value) -> Option<Spec> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (kind, state) = (text(&report["LeafNodeType"]), text(&report["State"]));
    if matches!(state.as_str(), "" | "skipped" | "pending") || (kind != "It" && state == "passed") {
        return None;
    }
    let mut words: Vec<String> = report["ContainerHierarchyTexts"]
        .as_array()
        .into_iter()
        .flatten()
        .map(text)
        .collect();
    words.push(if kind == "It" {
        text(&report["LeafNodeText"])
    } else {
        kind
    });
    Some(Spec {
        name: words.join(" "),
        state,
        message: text(&report["Failure"]["Message"]),
        time: Duration::from_nanos(report["RunTime"].as_u64().unwrap_or(0)),
    })
}

/// The specs as a Markdown page.
pub fn markdown(cluster: &ClusterRecord, selection: &Selection, specs: &[Spec]) -> String {
    let passed = specs.iter().filter(|spec| spec.passed()).count();
    let cni = cluster.cni_name();
    let mut page = format!(
        "# Conformance\n\n\
         The Kubernetes project's end-to-end tests on a cluster of network namespaces on one \
         machine: {} nodes beside that of the control plane, network plugin `{cni}`, kube-proxy \
         {}.\nWritten by `make conformance`; focus `{}`{}.\n\n\
         **{passed} of {} passed.**\n\n| result | seconds | spec |\n| --- | --- | --- |\n",
        cluster.workers,
        if cluster.kube_proxy { "on" } else { "off" },
        selection.focus,
        match selection.skip.as_str() {
            "" => String::new(),
            skip => format!(", without `{skip}`"),
        },
        specs.len(),
    );
    for spec in specs {
        let name = spec.name.replace('|', "\\|");
        let seconds = spec.time.as_secs();
        page += &format!("| {} | {seconds} | {name} |\n", spec.state);
    }
    page
}

/// The specs as a table for the terminal.
pub fn table(specs: &[Spec]) -> String {
    let rows: Vec<Vec<String>> = specs
        .iter()
        .map(|spec| {
            vec![
                spec.state.clone(),
                format!("{:.0} s", spec.time.as_secs_f64()),
                spec.name.clone(),
            ]
        })
        .collect();
    report::table(&["result", "time", "spec"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_gives_the_specs_that_ran_and_a_failed_set_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let text = r#"[{"SpecReports": [
            {"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
            {"LeafNodeType": "SynchronizedAfterSuite", "State": "failed",
             "Failure": {"Message": "late"}},
            {"LeafNodeType": "It", "State": "skipped", "LeafNodeText": "not this"},
            {"LeafNodeType": "It", "State": "passed", "LeafNodeText": "works", "RunTime": 2000000000,
             "ContainerHierarchyTexts": ["[sig-network]", "Pods"]},
            {"LeafNodeType": "It", "State": "failed", "LeafNodeText": "denies",
             "ContainerHierarchyTexts": ["Netpol"], "Failure": {"Message": "it did not"}}
        ]}]"#;
        std::fs::write(&path, text).unwrap();
        let specs = read(&path).unwrap();
        let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "SynchronizedAfterSuite",
                "[sig-network] Pods works",
                "Netpol denies"
            ]
        );
        assert!(specs[1].passed() && specs[1].time == Duration::from_secs(2));
        assert!(!specs[2].passed() && specs[2].message == "it did not");
    }

    #[test]
    fn a_report_without_a_spec_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        std::fs::write(&path, "[]").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("no spec"));
    }
}
