//! The optional log: one line for each call, appended to the configuration's `logFile`.
//!
//! ```text
//! 2026-01-31T12:00:00.123Z ADD container=4f2a… ifname=eth0 network=skein ok 10.0.0.2
//! ```

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Appends one line; control characters in it are escaped, so that a call is one line.
///
/// The line goes out in one write, and concurrent calls append whole lines.
pub fn append(path: &Path, now: SystemTime, line: &str) -> io::Result<()> {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let mut text = format!("{} ", utc(since));
    for c in line.chars() {
        if c.is_control() {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
    text.push('\n');
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .open(path)?
        .write_all(text.as_bytes())
}

/// RFC 3339 in UTC with milliseconds.
fn utc(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (mut days, of_day) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    let length_of = |year: u64| if is_leap(year) { 366 } else { 365 };
    while days >= length_of(year) {
        days -= length_of(year);
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!(
        "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        days + 1,
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60,
        since_epoch.subsec_millis()
    )
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let at = |seconds| utc(Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59.000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn a_call_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        append(&path, UNIX_EPOCH, "ADD failed: a\nb").unwrap();
        append(&path, UNIX_EPOCH, "DEL ok").unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "1970-01-01T00:00:00.000Z ADD failed: a\\nb\n1970-01-01T00:00:00.000Z DEL ok\n"
        );
        assert!(append(&folder.path().join("none/log"), UNIX_EPOCH, "x").is_err());
    }
}
