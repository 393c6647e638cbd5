//! Kernel settings of one interface, in the calling thread's network namespace.
//!
//! `/proc/sys/net` shows the namespace of whoever opens a file in it
//! (`Documentation/networking/ip-sysctl.rst` has the meanings).

use std::fs;
use std::io;
use std::path::Path;

use crate::request::IfName;

/// A setting that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {value} to {path}: {source}")]
pub struct SysctlError {
    path: String,
    value: &'static str,
    source: io::Error,
}

/// Writes `net.ipv6.conf.IFNAME.KEY`. `Ok(false)` where the kernel has no IPv6 at all, so
/// that there is nothing to set.
pub fn set_ipv6(ifname: &IfName, key: &str, value: &'static str) -> Result<bool, SysctlError> {
    let all = Path::new("/proc/sys/net/ipv6/conf");
    if !all.exists() {
        return Ok(false);
    }
    // An interface name holds no '/', so it is one component, dots and all.
    let path = all.join(ifname.as_str()).join(key);
    fs::write(&path, value)
        .map(|()| true)
        .map_err(|source| SysctlError {
            path: path.display().to_string(),
            value,
            source,
        })
}
