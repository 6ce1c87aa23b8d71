//! The verdict of the experiment `receive`: whether to read or to map pages.

use super::{MAPPED_PERCENT_MIN, ReceiveCase, ReceiveRound};
use crate::rounds::{Run, Series};
use crate::verdict::{Candidate, ComparedRow, Confidence, Question, Subject, Verdict};
use haul_workers::receive_method::ReceiveMethod;

/// The methods that deliver bytes to memory and that the library chooses from, in the order of
/// preference.
pub(super) const CANDIDATES: [ReceiveMethod; 2] = [ReceiveMethod::Mapped, ReceiveMethod::Read];

/// The verdict under the first condition for which both methods were requested.
pub(super) fn of(
    rows: &[Series<ReceiveCase, ReceiveRound>],
    run: &Run<'_>,
    has_two_hosts: bool,
) -> Option<Verdict> {
    let row =
        |method, condition| rows.iter().find(|row| row.case == ReceiveCase { method, condition });
    let (mapped, condition) = rows
        .iter()
        .filter(|row| row.case.method == ReceiveMethod::Mapped)
        .map(|row| (row, row.case.condition))
        .find(|(_, condition)| row(ReceiveMethod::Read, *condition).is_some())?;
    let mapped_percent = mapped_percent(mapped);
    let compared: Vec<ComparedRow<'_, _, _>> = CANDIDATES
        .into_iter()
        .filter_map(|method| {
            let series = row(method, condition)?;
            let obstacle = (method == ReceiveMethod::Mapped
                && mapped_percent < Some(MAPPED_PERCENT_MIN))
            .then(|| "pages could not be mapped".to_owned());
            Some(ComparedRow { name: method.name().into(), series, obstacle })
        })
        .collect();
    let both =
        |round: &ReceiveRound| round.costs.sender_us_per_mib + round.costs.receiver_us_per_mib;
    let candidates = Candidate::of_rows(
        &compared,
        ReceiveMethod::Read.name(),
        &|round| round.costs.receiver_us_per_mib,
        has_two_hosts.then_some(&both),
    );
    let subject = Subject {
        question: Question::Receive,
        baseline: ReceiveMethod::Read.name(),
        cost: "the receiver's CPU",
        how,
        retry: run.longer_command("receive"),
        obstacle: run.obstacle(),
    };
    // What the kernel did not map needs no comparison of costs.
    match mapped_percent.filter(|&percent| percent < MAPPED_PERCENT_MIN) {
        Some(percent) => Some(Verdict {
            confidence: Confidence::Certain,
            choice: Some(ReceiveMethod::Read.name().into()),
            how: Some("read(2); in Rust haul::Receiver, which maps if it can".into()),
            ..Verdict::without_saving(
                Question::Receive,
                &unmapped_statement(percent, condition.mtu),
            )
        }),
        None => Some(subject.verdict(&candidates)),
    }
}

/// The statement where the kernel could not map pages.
pub(crate) fn unmapped_statement(percent: f64, mtu: u32) -> String {
    format!("read(2): zero-copy receive mapped {percent:.0} % at MTU {mtu}")
}

/// The share of the bytes that a row mapped; `None` without rounds.
fn mapped_percent(row: &Series<ReceiveCase, ReceiveRound>) -> Option<f64> {
    let sum =
        |of: fn(&ReceiveRound) -> f64| row.rounds.iter().map(|(_, round)| of(round)).sum::<f64>();
    let bytes = sum(|round| round.received.bytes as f64);
    (bytes > 0.0).then(|| 100.0 * sum(|round| round.received.mapped_bytes as f64) / bytes)
}

fn how(method: &str) -> Option<&'static str> {
    match method {
        "mapped" => Some("getsockopt(TCP_ZEROCOPY_RECEIVE); in Rust haul::Receiver"),
        "read" => Some("read(2); in Rust haul::Receiver"),
        _ => None,
    }
}
