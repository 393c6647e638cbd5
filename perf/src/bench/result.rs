//! Results as files: `latest.json` for programs, `latest.md` for people.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::scenario::Scenario;
use crate::cmd::Cmd;
use crate::{report, state};

/// Where and how the numbers were taken.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// `uname -r`.
    pub kernel: String,
    /// Model name.
    pub cpu: String,
    /// Number of CPUs.
    pub cpus: usize,
    /// UTC, RFC 3339.
    pub date: String,
    /// Commit, with `-dirty` where the tree had changes; `unknown` outside a repository.
    pub commit: String,
    /// The command line.
    pub command: String,
    /// Which thread ran where.
    pub placement: String,
}

/// One metric of one scenario.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Short and stable.
    pub id: String,
    /// For people.
    pub scenario: String,
    /// What is counted.
    pub metric: String,
    /// In what.
    pub unit: String,
    /// Skein's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skein: Option<f64>,
    /// The baseline's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    /// What Skein is compared with.
    pub baseline_name: String,
    /// Median of skein / baseline, pair by pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Pairs.
    pub runs: usize,
    /// The least and the greatest ratio of a pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<[f64; 2]>,
    /// Why there is no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// All that a run of the benchmark found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Where and how.
    pub host: Host,
    /// What.
    pub rows: Vec<Row>,
}

impl Row {
    /// Rows from pairs of runs; a run has a value for each metric of the scenario.
    pub fn of(scenario: &Scenario, runs: &[(Vec<f64>, Vec<f64>)]) -> Vec<Self> {
        let mut rows = Self::empty(scenario);
        for (index, row) in rows.iter_mut().enumerate() {
            let ours: Vec<f64> = runs.iter().map(|run| run.0[index]).collect();
            let theirs: Vec<f64> = runs.iter().map(|run| run.1[index]).collect();
            let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
            row.runs = runs.len();
            row.skein = median(&ours);
            row.baseline = median(&theirs);
            row.ratio = median(&ratios);
            let least = ratios.iter().copied().reduce(f64::min);
            let greatest = ratios.iter().copied().reduce(f64::max);
            row.spread = least.zip(greatest).map(|(a, b)| [a, b]);
        }
        rows
    }

    /// Rows of a scenario that could not run.
    pub fn errors(scenario: &Scenario, error: &anyhow::Error) -> Vec<Self> {
        let mut rows = Self::empty(scenario);
        for row in &mut rows {
            row.error = Some(format!("{error:#}"));
        }
        rows
    }

    /// Whether there is no result.
    pub fn failed(&self) -> bool {
        self.error.is_some()
    }

    fn empty(scenario: &Scenario) -> Vec<Self> {
        let metrics = scenario.measure.metrics();
        metrics
            .iter()
            .map(|(metric, unit)| Self {
                // An id names a row: the metric tells apart those of one scenario.
                id: match metrics.len() {
                    1 => scenario.id.clone(),
                    _ => format!("{}-{metric}", scenario.id),
                },
                scenario: scenario.title.clone(),
                metric: (*metric).to_owned(),
                unit: (*unit).to_owned(),
                baseline_name: scenario.baseline().to_owned(),
                ..Self::default()
            })
            .collect()
    }
}

impl Host {
    /// This machine, now.
    ///
    /// # Errors
    /// If `/proc` does not tell.
    pub fn here(placement: &str) -> Result<Self> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
        let cpu = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map_or("unknown", |(_, name)| name.trim());
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let date = Cmd::line("date -u +%Y-%m-%dT%H:%M:%SZ").run()?.stdout;
        let commit = Cmd::line("git describe --always --dirty --abbrev=12 --exclude *")
            .try_run()
            .ok()
            .filter(|output| output.status.success())
            .map_or("unknown".to_owned(), |output| output.stdout);
        // The path of the program says nothing about the measurement.
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        Ok(Self {
            kernel: kernel.trim().to_owned(),
            cpu: cpu.to_owned(),
            cpus: std::thread::available_parallelism()?.get(),
            date: date.trim().to_owned(),
            commit: commit.trim().to_owned(),
            command: format!("skein-lab {}", arguments.join(" ")),
            placement: placement.to_owned(),
        })
    }
}

impl Report {
    /// Writes `latest.json` and `latest.md` into `folder`.
    ///
    /// # Errors
    /// The files'.
    pub fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        state::write_atomically(&folder.join("latest.json"), &json)?;
        let host = &self.host;
        let text = format!(
            "# Skein against the kernel\n\n{}\nLinux {}, {} ({} CPUs), {}, commit {}.\n\
             {}. `{}`\n\nMedians; the ratio is the median over pairs of runs, the spread its \
             least and greatest.\n",
            report::markdown(&HEADER, &self.cells()),
            host.kernel,
            host.cpu,
            host.cpus,
            host.date,
            host.commit,
            host.placement,
            host.command,
        );
        state::write_atomically(&folder.join("latest.md"), &text)
    }

    /// The rows for a terminal.
    pub fn table(&self) -> String {
        report::table(&HEADER, &self.cells())
    }

    fn cells(&self) -> Vec<Vec<String>> {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.2}"));
        self.rows
            .iter()
            .map(|row| {
                let spread = row.spread.map_or_else(
                    || row.error.clone().unwrap_or_default(),
                    |[a, b]| format!("{a:.2}–{b:.2}"),
                );
                vec![
                    row.scenario.clone(),
                    format!("{} {}", row.metric, row.unit),
                    number(row.skein),
                    number(row.baseline),
                    row.baseline_name.clone(),
                    number(row.ratio),
                    spread,
                ]
            })
            .collect()
    }
}

const HEADER: [&str; 7] = [
    "scenario", "metric", "Skein", "baseline", "which", "ratio", "spread",
];

/// The middle value, or the mean of the two in the middle; none of nothing.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::scenario;

    #[test]
    fn a_row_has_medians_and_ratios_pair_by_pair() {
        let scenario = &scenario::all("veth")[0];
        let runs = [(10.0, 5.0), (12.0, 12.0), (30.0, 10.0)];
        let runs: Vec<_> = runs.iter().map(|(a, b)| (vec![*a], vec![*b])).collect();
        let rows = Row::of(scenario, &runs);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].id, "udp64-same");
        assert_eq!(rows[0].skein, Some(12.0));
        assert_eq!(rows[0].baseline, Some(10.0));
        assert_eq!(rows[0].ratio, Some(2.0));
        assert_eq!(rows[0].spread, Some([1.0, 3.0]));
        assert_eq!(rows[0].runs, 3);
    }

    #[test]
    fn a_scenario_that_could_not_run_is_a_row_with_an_error_alone() {
        let scenario = &scenario::all("veth")[2];
        let rows = Row::errors(scenario, &anyhow::anyhow!("no such link"));
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["id"], "rr-same-p50");
        assert_eq!(json[1]["id"], "rr-same-p99");
        assert_eq!(json[1]["error"], "no such link");
        assert!(json[1].get("skein").is_none());
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
