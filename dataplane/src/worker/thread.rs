//! The loop of a worker's thread: turns, and what it does when there is nothing to do.

use std::time::{Duration, Instant as Clock};

use super::Worker;
use super::group::PollMode;
use crate::ids::LinkId;
use crate::time::Instant;

/// How long an adaptive worker keeps looking after the last packet before it sleeps. A wake-up
/// costs a few microseconds on either side; a request and its answer are some tens apart.
const SPIN: Duration = Duration::from_micros(50);

/// How often the worker's periodic work is due; also the longest sleep.
const TICK: Duration = Duration::from_millis(250);

/// Runs until the worker is told to stop.
pub(super) fn run(worker: &mut Worker, mode: PollMode, origin: Clock) {
    let mut ready: Vec<LinkId> = Vec::with_capacity(64);
    let mut last_packet = Clock::now();
    let mut last_tick = last_packet;
    while !worker.stopping() {
        let clock = Clock::now();
        let now = Instant::from_nanos(clock.duration_since(origin).as_nanos() as u64);
        let moved = worker.turn(&ready, now);
        if clock.duration_since(last_tick) >= TICK {
            last_tick = clock;
            worker.tick(now);
        }
        ready.clear();
        let spin = match mode {
            PollMode::Busy => true,
            PollMode::Adaptive => moved > 0 || clock.duration_since(last_packet) < SPIN,
            PollMode::Interrupt => moved > 0,
        };
        if moved > 0 {
            last_packet = clock;
        }
        if spin {
            worker.poller().ready(&mut ready);
        } else {
            worker.stats().sleeps.add(1);
            let idle = || worker.idle();
            worker.poller().sleep(&mut ready, TICK, idle);
        }
    }
}
