//! The guest's part of the counts: sends by each method, and marks what the plugin counts.

use super::{REFUSED, ROW};
use crate::vm::VmError;
use crate::vm::guest_tools::{call, connect};
use crate::vm::peer::READ_NOW;
use haul::{MethodOptions, SendMethod};
use haul_lab_sys::marker::{Mark, mark};
use haul_units::Size;
use haul_workers::lock_step::{self, LockStepConnection};
use haul_workers::one_copy::OneCopyMethod;
use haul_workers::page_cache::Folios;
use haul_workers::tested_method::TestedMethod;
use haul_workers::tls_records::{PLAINTEXT_BYTES_MAX, RecordSealer};
use haul_workers::workload::{Opened, Workload};
use std::error::Error;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The size of the file, and the bytes that each row sends.
const FILE_BYTES: u64 = 4 << 20;
/// The most bytes of one call.
const CALL_BYTES: u64 = 64 << 10;
/// Every kernel has this congestion control, which does not pace.
const CONGESTION: &str = "reno";
/// How long the host may take to acknowledge what the guest sent.
const ACKNOWLEDGE_MAX: Duration = Duration::from_secs(60);

/// Stands for the lent pages of a row without a proof.
const NO_PROOF: &str = "–";

/// The reason why a row is not counted.
type Refusal = Box<dyn Error>;

/// Counts every row, and prints the name of each.
pub(in crate::vm) fn count_all(port: u16) -> Result<(), VmError> {
    let open =
        |workload: Workload| workload.open().map_err(|error| VmError::Guest(error.to_string()));
    let size = Size(FILE_BYTES);
    let file = open(Workload::PageCache { size, folios: Folios::Small })?;
    let memory = open(Workload::Memory(Size(CALL_BYTES)))?;
    let read_write = TestedMethod::from(SendMethod::ReadWrite);
    let copied = TestedMethod::OneCopy(OneCopyMethod::SendfileCopied);
    let mapped = TestedMethod::OneCopy(OneCopyMethod::MappedWrite);
    let sendfile = TestedMethod::from(SendMethod::Sendfile);
    let zerocopy = TestedMethod::from(SendMethod::Zerocopy);
    print_row("send", over_loopback(read_write, &memory, false));
    print_row("read+write", over_loopback(read_write, &file, false));
    print_row("mapped+write", over_loopback(mapped, &file, false));
    print_row("sendfile-copied", over_loopback(copied, &file, false));
    print_row("sendfile", over_loopback(sendfile, &file, false));
    print_row("splice", over_loopback(SendMethod::Splice.into(), &file, false));
    print_row("read+encrypt+write", with_encryption(&file));
    print_row("kTLS send", over_loopback(read_write, &memory, true));
    print_row("kTLS read+write", over_loopback(read_write, &file, true));
    print_row("kTLS sendfile-copied", over_loopback(copied, &file, true));
    print_row("kTLS sendfile", over_loopback(sendfile, &file, true));
    print_row("virtio send", to_host(read_write, &memory, port));
    print_row("virtio MSG_ZEROCOPY", to_host(zerocopy, &memory, port));
    print_row("virtio read+write", to_host(read_write, &file, port));
    print_row("virtio sendfile", to_host(sendfile, &file, port));
    call("tc", &["qdisc", "replace", "dev", "eth0", "root", "fq"])?;
    print_row("virtio, fq: send", to_host(read_write, &memory, port));
    print_row("virtio, fq: sendfile", to_host(sendfile, &file, port));
    Ok(())
}

/// What a row sent.
struct Sent {
    bytes: u64,
    /// The lent pages of the proof, of sixteen.
    lent: String,
}

/// Prints the name of a row, after the plugin reported its counts.
fn print_row(name: &str, sent: Result<Sent, Refusal>) {
    match sent {
        Ok(Sent { bytes, lent }) => {
            mark(Mark::Report);
            println!("{ROW}{name}\t{bytes}\t{lent}");
        }
        Err(error) => {
            // An error can end a row while the plugin counts.
            mark(Mark::Reset);
            println!("{ROW}{name}\t{REFUSED}\t{error}");
        }
    }
}

/// Sends in lock step, where only the sending is counted.
fn over_loopback(
    method: TestedMethod,
    opened: &Opened,
    is_encrypted: bool,
) -> Result<Sent, Refusal> {
    let piece = &opened.pieces[0];
    let mut lock_step = LockStepConnection::new(CONGESTION)?;
    let lent = if is_encrypted {
        lock_step.encrypt_in_kernel()?;
        NO_PROOF.into()
    } else {
        let (from, to) = lock_step::connect(CONGESTION)?;
        let proof = method.prove(&from, &to)?;
        format!("{:.0}/16", 16.0 - proof.copied_percent() / 100.0 * 16.0)
    };
    let mut sender = lock_step.attach(method, CALL_BYTES, 0)?;
    lock_step.warm_up(&mut sender, piece)?;
    let mut rounds = |is_counted: bool| -> Result<u64, Refusal> {
        let mut bytes = 0;
        while bytes < FILE_BYTES {
            if is_counted {
                mark(Mark::Begin);
            }
            let sent = lock_step.send(&mut sender, piece);
            mark(Mark::End);
            let sent = sent?;
            lock_step.receive(&mut sender, sent)?;
            bytes += sent;
        }
        Ok(bytes)
    };
    // Not counted, so that every cache of the kernel's allocator is filled.
    rounds(false)?;
    Ok(Sent { bytes: rounds(true)?, lent })
}

/// Reads the file, encrypts in the program, and writes each record.
fn with_encryption(opened: &Opened) -> Result<Sent, Refusal> {
    let (mut from, mut to) = lock_step::connect(CONGESTION)?;
    let file = opened.pieces[0].file();
    let mut sealer = RecordSealer::default();
    let mut buffer = vec![0; CALL_BYTES as usize];
    let mut received = Vec::new();
    for is_counted in [false, true] {
        for offset in (0..FILE_BYTES).step_by(buffer.len()) {
            let mut sent = 0;
            if is_counted {
                mark(Mark::Begin);
            }
            file.read_exact_at(&mut buffer, offset)?;
            for plaintext in buffer.chunks(PLAINTEXT_BYTES_MAX) {
                let record = sealer.seal(plaintext)?;
                from.write_all(&record)?;
                sent += record.len();
            }
            mark(Mark::End);
            received.resize(sent, 0);
            to.read_exact(&mut received)?;
        }
    }
    Ok(Sent { bytes: FILE_BYTES, lent: NO_PROOF.into() })
}

/// Sends through the network card to the host. Everything is counted until the host acknowledged
/// the last byte.
fn to_host(method: TestedMethod, opened: &Opened, port: u16) -> Result<Sent, Refusal> {
    let mut stream = connect(port)?;
    stream.write_all(&[READ_NOW])?;
    let stream = Arc::new(stream);
    let options = MethodOptions::default().with_chunk_bytes(CALL_BYTES as usize);
    let mut method = method.attach(&stream, &options, None)?;
    let piece = &opened.pieces[0];
    for is_counted in [false, true] {
        if is_counted {
            mark(Mark::Begin);
        }
        let (mut bytes, mut position) = (0, 0);
        while bytes < FILE_BYTES {
            let sent = method.send(stream.as_fd(), piece, position..piece.len())?;
            bytes += sent;
            position = (position + sent) % piece.len();
        }
        let deadline = Instant::now() + ACKNOWLEDGE_MAX;
        while haul_sys::sockopt::bytes_to_send(&stream)? > 0
            || method.process_completions(stream.as_fd())? > 0
        {
            if Instant::now() >= deadline {
                return Err("the host does not acknowledge".into());
            }
            thread::sleep(Duration::from_millis(5));
        }
        mark(Mark::End);
    }
    let counts = method.counts();
    let lent = match (counts.zero_copied_bytes, counts.copied_bytes) {
        (0, 0) => NO_PROOF.into(),
        (lent, copied) => format!("{:.0} %", 100.0 * lent as f64 / (lent + copied) as f64),
    };
    Ok(Sent { bytes: FILE_BYTES, lent })
}
