//! Measures what AF_XDP links cost: kernel memory for each socket, and what an idle pod's link
//! loses of a first burst. Needs root; works in network namespaces of its own.
//!
//! ```text
//! cargo run --release -p skein-dataplane --example umem_memory -- [memory [CHUNKS] | burst]
//! ```

#[path = "../tests/netns_io/lab.rs"]
mod lab;

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::{Lab, Pod, in_lab};
use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::Link;
use skein_dataplane::io::device::Device;
use skein_dataplane::io::features::Features;
use skein_dataplane::io::link::{FillParameters, XskLink};
use skein_dataplane::io::open::{OpenOptions, open_link};
use skein_dataplane::io::poll::Poller;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::program::{LinkKind, XdpMode};
use skein_dataplane::io::xsk::{RingSizes, XskFactory};

const ROUNDS: usize = 5;
const BURSTS: usize = 40;

fn main() {
    in_lab(|lab| {
        println!("kernel {}", lab.run("uname -r").trim());
        println!("{}", Features::probe(&[]).expect("the features"));
        let only = std::env::args().nth(1);
        let wanted = |table: &str| only.as_deref().is_none_or(|only| only == table);
        if wanted("memory") {
            let chunks = std::env::args().nth(2).and_then(|text| text.parse().ok());
            memory_table(lab, chunks);
        }
        if wanted("burst") {
            burst_table(lab);
        }
    });
}

/// Kernel memory that sockets are made of, in KiB: slab (with the large blocks behind kmalloc)
/// and vmalloc. Page cache and processes do not disturb it.
fn kernel_kib() -> [i64; 2] {
    let text = std::fs::read_to_string("/proc/meminfo").expect("meminfo");
    ["SUnreclaim:", "VmallocUsed:"].map(|name| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse().ok())
            .expect("a field of meminfo")
    })
}

/// The same once it rests: sockets are freed a while after they close.
fn settled_kib() -> [i64; 2] {
    let mut last = kernel_kib();
    for _ in 0..40 {
        thread::sleep(Duration::from_millis(250));
        let now = kernel_kib();
        if (now[0] - last[0]).abs() + (now[1] - last[1]).abs() < 256 {
            return now;
        }
        last = now;
    }
    last
}

fn median(values: &[i64]) -> i64 {
    let mut values = values.to_vec();
    values.sort_unstable();
    values[values.len() / 2]
}

fn memory_table(lab: &Lab, chunks: Option<u32>) {
    let most = 250;
    for number in 0..most {
        lab.run(&format!(
            "ip link add m{number} type veth peer name n{number}"
        ));
    }
    println!(
        "\nKernel memory of sockets that share one packet memory (SUnreclaim + VmallocUsed).\n"
    );
    println!(
        "| sockets | chunks | MiB, median of {ROUNDS} | min, max | slab, vmalloc | bytes a chunk and socket | setup s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let all = [4096, 8192, 10080, 16384, 20160, 32768, 65536];
    for chunks in chunks.map_or(all.to_vec(), |chunks| vec![chunks]) {
        for sockets in [10, 110, most] {
            let rounds: Vec<_> = (0..ROUNDS).map(|_| memory_of(sockets, chunks)).collect();
            let column = |of: fn(&[i64; 2]) -> i64| -> Vec<i64> {
                rounds.iter().map(|(kib, _)| of(kib)).collect()
            };
            let all = column(|kib| kib[0] + kib[1]);
            let middle = median(&all);
            println!(
                "| {sockets} | {chunks} | {} | {}, {} | {}, {} | {} | {:.2} |",
                middle / 1024,
                all.iter().min().expect("a round") / 1024,
                all.iter().max().expect("a round") / 1024,
                median(&column(|kib| kib[0])) / 1024,
                median(&column(|kib| kib[1])) / 1024,
                middle * 1024 / (i64::from(chunks) * sockets as i64),
                rounds
                    .iter()
                    .map(|(_, time)| time.as_secs_f64())
                    .fold(f64::MAX, f64::min),
            );
        }
    }
}

/// What so many sockets take, slab and vmalloc, and how long they take to set up.
fn memory_of(sockets: usize, chunks: u32) -> ([i64; 2], Duration) {
    let store = FrameStore::new(chunks).expect("packet memory");
    let features = Features::probe(&[]).expect("the features");
    let factory = XskFactory::new(Arc::clone(store.umem()), features).expect("registration");
    let devices: Vec<Device> = (0..sockets)
        .map(|number| Device::named(&format!("m{number}")).expect("a device"))
        .collect();
    let before = settled_kib();
    let start = Instant::now();
    let opened: Vec<_> = devices
        .iter()
        .map(|device| {
            let rings = RingSizes::default();
            factory.open(device, QueueId(0), &rings).expect("a socket")
        })
        .collect();
    let setup = start.elapsed();
    let after = settled_kib();
    drop(opened);
    ([after[0] - before[0], after[1] - before[1]], setup)
}

fn burst_table(lab: &Lab) {
    let pod = lab.pod("ha", 1, 65535);
    pod.run("ip neigh replace 10.1.1.2 lladdr 02:00:00:00:00:09 dev eth0 nud permanent");
    pod.run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.core.wmem_default=8388608");
    let store = FrameStore::new(16384).expect("packet memory");
    let features = Features::probe(&[]).expect("the features");
    let factory = XskFactory::new(Arc::clone(store.umem()), features).expect("registration");
    println!(
        "\nA burst of frames into an idle pod link, generic mode; sender on CPU 0, worker asleep in poll on CPU 1."
    );
    println!(
        "\n| frames | bytes | chunks each | fill target | bursts of {BURSTS} with a loss | lost, median, most |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (payload, counts) in [(22, [64, 128, 256]), (61440, [4, 10, 30])] {
        for count in counts {
            for target in [32, 64, 192] {
                let lost: Vec<i64> = (0..BURSTS)
                    .map(|_| burst(lab, &pod, &factory, &store, target, count, payload))
                    .collect();
                println!(
                    "| {count} | {} | {} | {target} | {} | {}, {} |",
                    payload + 42,
                    (payload + 42usize).div_ceil(3840),
                    lost.iter().filter(|&&lost| lost > 0).count(),
                    median(&lost),
                    lost.iter().max().expect("a burst")
                );
            }
        }
    }
}

/// Sends one burst into a link just opened; returns how many frames did not arrive.
fn burst(
    lab: &Lab,
    pod: &Pod<'_>,
    factory: &Arc<XskFactory>,
    store: &Arc<FrameStore>,
    target: u32,
    count: usize,
    payload: usize,
) -> i64 {
    let bpffs = lab.bpffs();
    let mut options = OpenOptions::new(LinkKind::Pod, XdpMode::Generic, &bpffs);
    options.fill = FillParameters {
        start: target,
        ..FillParameters::default()
    };
    let mut pool = FramePool::new(Arc::clone(store));
    let (link, _handle) = open_link(
        &pod.device,
        QueueId(0),
        LinkId(0),
        &options,
        factory,
        &mut pool,
    )
    .expect("an open link");
    pod.up();
    let done = Arc::new(AtomicBool::new(false));
    let worker = thread::spawn({
        let done = Arc::clone(&done);
        move || worker(link, pool, &done)
    });
    thread::sleep(Duration::from_millis(30));
    let sender = pod.inside(move || {
        core_affinity::set_for_current(core_affinity::CoreId { id: 0 });
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a socket");
        socket.connect("10.1.1.2:9").expect("a route");
        let bytes = vec![0; payload];
        thread::sleep(Duration::from_millis(5));
        (0..count).filter(|_| socket.send(&bytes).is_ok()).count()
    });
    let sent = sender.join().expect("the sender");
    thread::sleep(Duration::from_millis(20));
    done.store(true, Ordering::Relaxed);
    sent as i64 - worker.join().expect("the worker")
}

/// Sleeps until packets come, takes them, and so on.
fn worker(mut link: XskLink, mut pool: FramePool, done: &AtomicBool) -> i64 {
    core_affinity::set_for_current(core_affinity::CoreId { id: 1 });
    let mut batch = Vec::new();
    let mut count = 0;
    let poller = Poller::new().expect("an epoll");
    let fd = link.poll_fd().expect("a descriptor");
    poller.add(LinkId(0), fd).expect("it can be polled");
    let mut ready = Vec::new();
    while !done.load(Ordering::Relaxed) {
        ready.clear();
        poller.sleep(&mut ready, Duration::from_millis(10), || true);
        while link.receive(&mut pool, &mut batch) > 0 {
            count += batch
                .iter()
                .filter(|packet| packet.head(pool.umem())[12] == 8)
                .count() as i64;
            batch.drain(..).for_each(|packet| pool.give_packet(packet));
        }
    }
    Box::new(link).close(&mut pool);
    count
}
