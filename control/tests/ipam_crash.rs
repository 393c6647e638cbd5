//! Addresses that were promised survive a kill at any moment.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use skein_cni::agent::Attachment;
use skein_control::ipam::Ipam;

const FOLDER: &str = "SKT_IPAM_CRASH_FOLDER";
const NAME: &str = "what_was_promised_survives_a_kill";

fn attachment(n: u32) -> Attachment {
    Attachment {
        container_id: format!("c{n}"),
        ifname: "eth0".into(),
    }
}

fn open(folder: &Path) -> Ipam {
    let mut ipam = Ipam::open(folder).unwrap();
    ipam.set_ranges(&["10.1.0.0/24".parse().unwrap()]);
    ipam
}

/// Hands out and takes back for ever, and says each step once it is done.
fn work(folder: &Path) {
    let mut ipam = open(folder);
    let mut out = std::io::stdout();
    for n in 0.. {
        let ips = ipam.allocate(&attachment(n), &[]).unwrap();
        writeln!(out, "+ {n} {}", ips[0]).unwrap();
        if n % 3 == 2 {
            // Said before: after that the address may be anybody's.
            writeln!(out, "- {} -", n - 1).unwrap();
            ipam.release(&attachment(n - 1)).unwrap();
        }
        if n % 100 == 99 {
            for n in n - 99..=n {
                writeln!(out, "- {n} -").unwrap();
                ipam.release(&attachment(n)).unwrap();
            }
        }
    }
}

#[test]
fn what_was_promised_survives_a_kill() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return work(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    // Each round kills after another number of steps.
    for steps in [1, 7, 20, 43, 101, 150] {
        let _ = std::fs::remove_file(folder.path().join("ipam.json"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut promised: BTreeMap<u32, IpAddr> = BTreeMap::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        let mut take = |line: &str| {
            let parts: Vec<_> = line.split(' ').collect();
            let (sign, Some(n)) = (parts[0], parts.get(1).and_then(|n| n.parse().ok())) else {
                return; // The test harness talks too.
            };
            match sign {
                "+" => drop(promised.insert(n, parts[2].parse().unwrap())),
                "-" => drop(promised.remove(&n)),
                _ => return,
            }
            seen += 1;
        };
        for line in lines.by_ref().take(steps + 4) {
            take(&line.unwrap());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it said before it died.
        for line in lines {
            take(&line.unwrap());
        }
        assert!(seen >= steps, "{seen} of {steps} steps");
        let mut ipam = open(folder.path());
        for (n, ip) in promised {
            assert_eq!(ipam.allocate(&attachment(n), &[]).unwrap(), [ip]);
        }
    }
}
