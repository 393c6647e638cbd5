//! A private piece of network for one test: a thread with its own network and mount namespace,
//! pods in namespaces of their own behind veth pairs, and a bpffs.
//!
//! Everything hangs on the thread's namespaces, so that the kernel removes all of it when the
//! thread ends, however it ends.

#![expect(unsafe_code, reason = "namespaces and mounts of the thread")]

use std::ffi::CString;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{io, panic, thread};

use skein_dataplane::io::device::Device;

/// Tests that move traffic run one after another: each would starve the others.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static COUNTER: AtomicU32 = AtomicU32::new(0);

pub struct Lab {
    prefix: String,
    bpffs: PathBuf,
}

/// Runs `body` in a lab of its own.
pub fn in_lab<T: Send>(body: impl FnOnce(&Lab) -> T + Send) -> T {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let result = thread::scope(|scope| scope.spawn(|| body(&Lab::new())).join());
    result.unwrap_or_else(|cause| panic::resume_unwind(cause))
}

impl Lab {
    fn new() -> Self {
        unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS);
        mount(
            "none",
            Path::new("/"),
            None,
            libc::MS_REC | libc::MS_PRIVATE,
        );
        let names = Path::new("/run/netns");
        std::fs::create_dir_all(names).expect("/run/netns");
        mount("tmpfs", names, Some("tmpfs"), 0);
        let bpffs = names.join("bpffs");
        std::fs::create_dir(&bpffs).expect("a folder for the bpffs");
        mount("bpf", &bpffs, Some("bpf"), 0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let lab = Self {
            prefix: format!("skt-{}-{number}", std::process::id()),
            bpffs,
        };
        lab.run("ip link set lo up");
        lab
    }

    pub fn bpffs(&self) -> PathBuf {
        self.bpffs.clone()
    }

    /// Runs a command without shell; panics with its output when it fails.
    pub fn run(&self, command: &str) -> String {
        let (ok, output) = self.try_run(command);
        assert!(ok, "{command}\n{output}");
        output
    }

    pub fn try_run(&self, command: &str) -> (bool, String) {
        let mut words = command.split_whitespace();
        let output = Command::new(words.next().expect("a command"))
            .args(words)
            .output()
            .unwrap_or_else(|error| panic!("{command}: {error}"));
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        (output.status.success(), text)
    }

    /// A pod behind a veth whose host end is `host`, still down, with MTU `mtu` on both ends.
    pub fn pod(&self, host: &str, last_octet: u8, mtu: u32) -> Pod<'_> {
        self.pod_with_queues(host, last_octet, mtu, 1)
    }

    /// The same with that many queues on both ends.
    pub fn pod_with_queues(&self, host: &str, last_octet: u8, mtu: u32, queues: u32) -> Pod<'_> {
        let device = format!("mtu {mtu} numrxqueues {queues} numtxqueues {queues}");
        let netns = format!("{}-{host}-{last_octet}", self.prefix);
        self.run(&format!("ip netns add {netns}"));
        self.run(&format!(
            "ip link add {host} {device} type veth peer name eth0 {device} netns {netns}"
        ));
        let pod = Pod {
            lab: self,
            device: Device::named(host).expect("the device just made"),
            netns,
            address: Ipv4Addr::new(10, 1, 1, last_octet),
        };
        let address = pod.address;
        pod.run("ip link set lo up");
        pod.run(&format!("ip addr add {address}/24 dev eth0"));
        pod.run(&format!("ip addr add fd00::{last_octet}/64 dev eth0 nodad"));
        pod.run("ip link set eth0 up");
        pod
    }
}

pub struct Pod<'a> {
    lab: &'a Lab,
    pub device: Device,
    pub netns: String,
    pub address: Ipv4Addr,
}

impl Pod<'_> {
    pub fn run(&self, command: &str) -> String {
        self.lab
            .run(&format!("ip netns exec {} {command}", self.netns))
    }

    /// Runs a command in the pod that may fail; tells whether it did not, and its output.
    #[allow(
        dead_code,
        reason = "the measurement includes this file too and needs less"
    )]
    pub fn try_run(&self, command: &str) -> (bool, String) {
        self.lab
            .try_run(&format!("ip netns exec {} {command}", self.netns))
    }

    /// Runs `body` in a thread inside the pod.
    pub fn inside<T: Send + 'static>(
        &self,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let path = format!("/run/netns/{}", self.netns);
        let namespace = File::open(&path).expect("the pod's namespace");
        thread::spawn(move || {
            // SAFETY: changes this thread's namespace only; the descriptor is open.
            let result = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(result, 0, "setns: {}", io::Error::last_os_error());
            body()
        })
    }

    /// Takes the host end up.
    pub fn up(&self) {
        self.lab
            .run(&format!("ip link set {} up", self.device.name));
    }
}

fn unshare(flags: i32) {
    // SAFETY: changes this thread's namespaces only.
    let result = unsafe { libc::unshare(flags) };
    assert_eq!(
        result,
        0,
        "these tests need root, for network namespaces: unshare: {}",
        io::Error::last_os_error()
    );
}

fn mount(source: &str, target: &Path, kind: Option<&str>, flags: libc::c_ulong) {
    let source = CString::new(source).unwrap();
    let c_target = CString::new(target.to_string_lossy().as_bytes()).unwrap();
    let kind = kind.map(|kind| CString::new(kind).unwrap());
    // SAFETY: C strings that live across the call, and no data.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            c_target.as_ptr(),
            kind.as_ref().map_or(std::ptr::null(), |kind| kind.as_ptr()),
            flags,
            std::ptr::null(),
        )
    };
    assert_eq!(
        result,
        0,
        "mount on {}: {}",
        target.display(),
        io::Error::last_os_error()
    );
}
