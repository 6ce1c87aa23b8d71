//! A link with a delay: two TUN devices, and threads that pass each packet on when its time has
//! come.
//!
//! netem does the same in the kernel, where it exists. Large packets pass whole, as they do on a
//! veth pair, and each is copied on the way. The threads run on the receiving host's CPU, so that
//! they do not count as the sending host's cost.

use crate::cpus;
use crate::error::LabError;
use crate::host::Host;
use crate::netlink;
use haul_lab_sys::tun;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A packet of several segments has at most 64 KiB.
const PACKET_BYTES_MAX: usize = tun::HEADER_BYTES + (64 << 10);
/// Packets that a device queues before it drops them: more than a congestion window of single
/// segments.
const QUEUE_PACKETS: u32 = 20_000;

/// A packet under way, and when it arrives.
type Packet = (Instant, Vec<u8>);

/// Tells the threads to end.
#[derive(Debug)]
struct Stop {
    is_set: AtomicBool,
    /// Readable once it is set.
    event: OwnedFd,
}

/// The threads of a link.
#[derive(Debug)]
pub(crate) struct DelayLine {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl DelayLine {
    /// Joins two hosts, assigns their addresses and sets both ends up. Packets take at least
    /// `delay` in each direction, and longer if the CPU is busy.
    pub fn join(one: &Host, other: &Host, mtu: u32, delay: Duration) -> Result<Self, LabError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| LabError::step("making an event counter")(errno.into()))?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let mut line = Self { stop, threads: Vec::new() };
        let [one_device, other_device] = [open(one, mtu)?, open(other, mtu)?];
        let cpu = other.cpu();
        for (from, to) in [(&one_device, &other_device), (&other_device, &one_device)] {
            let (packet_tx, packet_rx) = mpsc::channel();
            let (from, to, stop) = (Arc::clone(from), Arc::clone(to), Arc::clone(&line.stop));
            line.start(cpu, move || take_packets(&from, &stop, delay, &packet_tx))?;
            line.start(cpu, move || pass_packets(&to, &packet_rx))?;
        }
        Ok(line)
    }

    fn start(&mut self, cpu: usize, work: impl FnOnce() + Send + 'static) -> Result<(), LabError> {
        let thread = thread::Builder::new().name("haul-delay".into()).spawn(move || {
            // On another CPU it does its work as well.
            let _ = cpus::pin_to(cpu);
            work();
        });
        self.threads.push(thread.map_err(LabError::step("starting a thread"))?);
        Ok(())
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        self.stop.is_set.store(true, Relaxed);
        // It holds 0: the write cannot block.
        let _ = rustix::io::write(&self.stop.event, &1u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Creates a host's device.
fn open(host: &Host, mtu: u32) -> Result<Arc<OwnedFd>, LabError> {
    if host.namespace().is_none() {
        return Err(LabError::Loopback("a delay"));
    }
    host.run(|| {
        let device = tun::create(host.device())
            .map_err(LabError::step("creating a TUN device for a delay"))?;
        netlink::set_mtu_and_queue(host.device(), mtu, QUEUE_PACKETS)?;
        netlink::add_address(host.device(), host.address())?;
        netlink::set_up(host.device())?;
        Ok(Arc::new(device))
    })?
}

/// Reads packets from a device until the line stops.
fn take_packets(from: &OwnedFd, stop: &Stop, delay: Duration, packets: &Sender<Packet>) {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    while !stop.is_set.load(Relaxed) {
        match rustix::io::read(from, &mut buffer) {
            Ok(count) => {
                if packets.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let event = PollFd::new(&stop.event, PollFlags::IN);
                let _ = poll(&mut [PollFd::new(from, PollFlags::IN), event], None);
            }
            // The device is gone.
            Err(_) => return,
        }
    }
}

/// Writes packets to a device, each at its time, until the line stops.
fn pass_packets(to: &OwnedFd, packets: &Receiver<Packet>) {
    for (time, packet) in packets {
        thread::sleep(time.saturating_duration_since(Instant::now()));
        // A packet that the device does not take is lost, as on a link.
        let _ = rustix::io::write(to, &packet);
    }
}
