//! Loans over a link that loses packets, and with hardly any room for notices.

use haul::{Limits, Outcome, Pool, SendSettings, Sender};
use haul_lab::{Lab, LabError};
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

fn in_lab() -> Option<(Lab, TcpStream, TcpStream)> {
    let lab = match Lab::veth(&haul_lab::Settings::default()) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: loans are not tested in a lab: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (from, to) = lab.connect().unwrap();
    Some((lab, from, to))
}

/// The stream's byte at a position.
fn byte_at(position: usize) -> u8 {
    ((position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Lends buffers of all sizes, each written over as soon as it is back: a buffer that came back early would be
/// seen by the peer.
fn lend_and_overwrite(sender: &mut Sender<TcpStream>, total: usize) -> (usize, usize) {
    let pool = Pool::new(300_000, 40).unwrap();
    let mut random = fastrand::Rng::with_seed(5);
    let (mut position, mut copied, mut zero_copied) = (0, 0, 0);
    let mut reclaim = |sender: &mut Sender<TcpStream>| {
        for mut back in sender.reclaim().unwrap() {
            if let haul::Buffer::Pooled(buffer) = &mut back.buffer {
                buffer.fill(0xEE);
            }
            match back.outcome {
                Outcome::Copied => copied += 1,
                Outcome::ZeroCopied => zero_copied += 1,
            }
        }
    };
    while position < total {
        let mut buffer = pool.take().unwrap();
        buffer.set_len(random.usize(1..300_000).min(total - position));
        for (offset, byte) in buffer.iter_mut().enumerate() {
            *byte = byte_at(position + offset);
        }
        position += buffer.len();
        sender.lend(buffer).unwrap();
        reclaim(sender);
        if random.u32(0..20) == 0 {
            // A fork and an exec in the middle: the child has neither the pages nor the notices.
            assert!(Command::new("true").status().unwrap().success());
        }
    }
    assert_eq!(sender.settle(Duration::from_secs(30)).unwrap(), 0);
    reclaim(sender);
    assert_eq!(pool.out(), 0);
    (copied, zero_copied)
}

fn receive_and_check(mut to: TcpStream) -> thread::JoinHandle<usize> {
    thread::spawn(move || {
        let (mut position, mut some) = (0, vec![0; 100_000]);
        loop {
            let count = to.read(&mut some).unwrap();
            if count == 0 {
                return position;
            }
            for (offset, &byte) in some[..count].iter().enumerate() {
                assert_eq!(
                    byte,
                    byte_at(position + offset),
                    "byte {} is not what was lent",
                    position + offset
                );
            }
            position += count;
        }
    })
}

#[test]
fn packets_may_be_lost_and_what_is_sent_again_is_what_was_lent() {
    const TOTAL: usize = 24 << 20;
    let Some((lab, from, to)) = in_lab() else { return };
    match lab.set_loss("0.5%".parse().unwrap()) {
        Ok(()) => {}
        Err(error) => eprintln!("SKIPPED: the link loses nothing: {error}"),
    }
    let receiving = receive_and_check(to);
    let mut sender = Sender::new(from).unwrap();
    lend_and_overwrite(&mut sender, TOTAL);
    drop(sender);
    assert_eq!(receiving.join().unwrap(), TOTAL);
}

/// Each notice is charged to `optmem_max`; with room for none, every loan is refused and copied.
#[test]
fn with_hardly_any_room_for_notices_nothing_hangs() {
    const TOTAL: usize = 8 << 20;
    let Some((lab, _, _)) = in_lab() else { return };
    // Each network namespace has its own since Linux 6.8.
    let file = "/proc/sys/net/core/optmem_max";
    if let Err(error) = lab.sender.run(|| fs::write(file, "1")).unwrap() {
        return eprintln!("SKIPPED: {file} cannot be written here: {error}");
    }
    // The limit is a socket's from its making on.
    let (from, to) = lab.connect().unwrap();
    let receiving = receive_and_check(to);
    let limits = Limits { loans_max: 39, ..Limits::default() };
    let mut sender =
        Sender::with(from, SendSettings { limits, ..SendSettings::default() }).unwrap();
    let (copied, _) = lend_and_overwrite(&mut sender, TOTAL);
    let report = sender.report();
    assert!(copied > 0 && report.no_room > 0, "the limit was not felt: {report:?}");
    drop(sender);
    assert_eq!(receiving.join().unwrap(), TOTAL);
}
