//! The names of methods, and shares of the bytes, as reports and expectations have them.

use haul_tally::{NotElided, SendMethod};

/// The name of a method in reports.
pub fn method_name(method: SendMethod) -> &'static str {
    match method {
        SendMethod::Sendfile => "sendfile",
        SendMethod::Splice => "splice",
        SendMethod::Zerocopy => "zerocopy",
        SendMethod::MappedFile => "copied-from-mapped-file",
        SendMethod::FileRead => "copied-from-file-read",
        SendMethod::SocketRead => "copied-from-socket-read",
        SendMethod::Memory => "copied-from-memory",
        SendMethod::Elided => "elided",
    }
}

/// The name of a reason in reports.
pub fn reason_name(reason: NotElided) -> &'static str {
    match reason {
        NotElided::Small => "small",
        NotElided::Call => "call",
        NotElided::NoFile => "no-file",
        NotElided::Mapping => "mapping",
        NotElided::PrivatePages => "private-pages",
        NotElided::Writer => "writer",
        NotElided::Permission => "permission",
        NotElided::NoLeases => "no-leases",
        NotElided::Broken => "broken",
        NotElided::Draining => "draining",
        NotElided::Busy => "busy",
        NotElided::NoBroker => "no-broker",
        NotElided::Dearer => "dearer",
        NotElided::Compared => "compared",
        NotElided::LocalPeer => "local-peer",
        NotElided::OtherNamespace => "other-namespace",
        NotElided::OldKernel => "old-kernel",
        NotElided::Remainder => "remainder",
    }
}

/// The share of a part in percent; `None` of nothing.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64 * 100.0)
}
