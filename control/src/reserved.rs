//! The node's own ports beside those of masquerade: reserved, so that the kernel hands none of
//! them out, and looked at, since a program may still have bound one by name.

use std::fs;
use std::io;
use std::path::Path;

use crate::config::PortRange;

/// Ports that the kernel does not choose by itself.
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// The kernel's lists of sockets with ports.
const SOCKETS: [&str; 4] = ["tcp", "tcp6", "udp", "udp6"];

/// Adds a range to those that the kernel does not choose from; what is reserved stays.
pub fn reserve(range: PortRange) -> io::Result<()> {
    reserve_in(Path::new(RESERVED), range)
}

fn reserve_in(path: &Path, range: PortRange) -> io::Result<()> {
    let before = fs::read_to_string(path)?;
    let own = format!("{}-{}", range.first, range.last);
    let wanted = match before.trim() {
        "" => own,
        others if others.split(',').any(|other| other == own) => return Ok(()),
        others => format!("{others},{own}"),
    };
    fs::write(path, wanted)
}

/// Ports of the range that sockets in this network namespace have.
pub fn taken(range: PortRange) -> io::Result<Vec<u16>> {
    let mut ports = Vec::new();
    for name in SOCKETS {
        match fs::read_to_string(format!("/proc/thread-self/net/{name}")) {
            Ok(text) => ports.extend(local_ports(&text).filter(|&port| range.contains(port))),
            // No IPv6 here.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ports)
}

/// The local ports of a list: the second column is `address:port`, in hexadecimal.
fn local_ports(text: &str) -> impl Iterator<Item = u16> {
    text.lines().skip(1).filter_map(|line| {
        let local = line.split_whitespace().nth(1)?;
        let (_, port) = local.rsplit_once(':')?;
        u16::from_str_radix(port, 16).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: PortRange = PortRange {
        first: 61_000,
        last: 64_999,
    };

    #[test]
    fn what_was_reserved_stays_and_nothing_stands_twice() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("reserved");
        for (before, after) in [
            ("\n", "61000-64999"),
            ("8080,9000-9010\n", "8080,9000-9010,61000-64999"),
            ("8080,61000-64999\n", "8080,61000-64999\n"),
        ] {
            fs::write(&file, before).unwrap();
            reserve_in(&file, RANGE).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
        }
    }

    #[test]
    fn a_sockets_port_is_read_from_the_kernels_list() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let all = PortRange {
            first: 1,
            last: u16::MAX,
        };
        assert!(taken(all).unwrap().contains(&port));
        let text = "  sl  local_address rem_address\n   0: 0100007F:EE48 00000000:0000 0A\n";
        assert_eq!(local_ports(text).collect::<Vec<_>>(), [61_000]);
    }
}
