//! Whether the kernel lends pages of the page cache to sockets, and what copying them would cost.

use super::{Finding, Verdict};
use crate::kernel_hardening;
use haul::{CopyProof, ProofError, SendMethod};
use haul_workers::one_copy::{OneCopyMethod, OneCopySender};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;

const PAGE_BYTES: usize = 4096;

pub(super) fn examine() -> Vec<Finding> {
    vec![lending(), copying(), zeroing(), mitigations()]
}

fn finding(name: &'static str, value: String, verdict: Verdict, why: &str) -> Finding {
    Finding { name, value, verdict, why: why.into(), fix: None, safety: None }
}

/// The result of a proof in pages.
fn pages(proof: &CopyProof) -> String {
    let [lent, copied] =
        [proof.zero_copied_bytes, proof.copied_bytes].map(|bytes| bytes / PAGE_BYTES);
    format!("{lent} of {} pages lent", lent + copied)
}

fn lending() -> Finding {
    let name = "page lending";
    match haul::probe(SendMethod::Sendfile) {
        Ok(proof) if proof.copied_bytes == 0 => finding(
            name,
            pages(&proof),
            Verdict::Good,
            "sendfile sends the pages of the page cache, without a copy",
        ),
        Ok(proof) => finding(
            name,
            pages(&proof),
            Verdict::Costly,
            "this kernel copies what sendfile sends: haul bench copies measures the cost",
        ),
        Err(error) => finding(
            name,
            format!("not known: {error}"),
            Verdict::Note,
            "sendfile could not be tested on loopback",
        ),
    }
}

fn copying() -> Finding {
    let name = "page copying";
    match prove_copying() {
        Ok(proof) => finding(
            name,
            pages(&proof),
            Verdict::Good,
            "sendfile of a file on tmpfs with O_DIRECT copies: haul bench copies compares both",
        ),
        Err(error) => finding(
            name,
            format!("not possible: {error}"),
            Verdict::Note,
            "haul bench copies has no row in which sendfile copies",
        ),
    }
}

/// Sends by a `sendfile` that copies, on loopback.
fn prove_copying() -> Result<CopyProof, ProofError> {
    let failed = |step| move |error: io::Error| ProofError::Connection { step, error };
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let from = TcpStream::connect(listener.local_addr()?)?;
        Ok((from, listener.accept()?.0))
    };
    let (from, to) = connect().map_err(failed("connecting on loopback"))?;
    let mut sender = OneCopySender::new(OneCopyMethod::SendfileCopied, usize::MAX);
    haul::prove_by(&to, |memory, range| {
        sender.send(from.as_fd(), memory.file(), &range).map_err(failed("sendfile"))
    })
}

fn zeroing() -> Finding {
    let (value, why) = match kernel_hardening::zeroes_new_pages() {
        Some(true) => (
            "on",
            "init_on_alloc: the kernel writes zeros to each page before it copies bytes there, \
             which favours sendfile",
        ),
        Some(false) => ("off", "init_on_alloc: new pages are not filled with zeros"),
        None => ("not known", "init_on_alloc: the kernel's configuration is not readable"),
    };
    finding("page zeroing", value.into(), Verdict::Good, why)
}

fn mitigations() -> Finding {
    let value = match kernel_hardening::mitigations() {
        Some(names) if names.is_empty() => "none".to_owned(),
        Some(names) => names.join(", "),
        None => "not known".to_owned(),
    };
    finding(
        "mitigations",
        value,
        Verdict::Good,
        "measures against weaknesses of the CPU, which make system calls cost more",
    )
}
