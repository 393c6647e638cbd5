//! Network devices, by name and index.

#![expect(unsafe_code, reason = "the system calls that name and flag a device")]

use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

/// A network device of the calling thread's network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
}

impl Device {
    /// Looks the device up in the calling thread's network namespace.
    pub fn named(name: &str) -> io::Result<Self> {
        let c_name = CString::new(name).map_err(io::Error::other)?;
        // SAFETY: a C string that lives across the call.
        let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            name: name.into(),
            index,
        })
    }

    /// Takes the device down, or up again; returns whether it was up.
    pub(super) fn set_up(&self, up: bool) -> io::Result<bool> {
        let socket = UnixDatagram::unbound()?;
        // SAFETY: `ifreq` is made of integers and bytes, for which zero is a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name[..room].iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        let call = |code, request: &mut libc::ifreq| {
            // SAFETY: the kernel reads and writes an `ifreq` that lives across the call.
            let result = unsafe { libc::ioctl(socket.as_raw_fd(), code, request) };
            (result == 0)
                .then_some(())
                .ok_or_else(io::Error::last_os_error)
        };
        call(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the kernel has just filled in the flags.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let bit = libc::IFF_UP as libc::c_short;
        request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
        call(libc::SIOCSIFFLAGS, &mut request)?;
        Ok(flags & bit != 0)
    }
}
