//! The verdict of the experiment `interrupts`: the call to send many datagrams with.

use super::row::send_call_name;
use super::{InterruptsCase, InterruptsRound, SendCall, Traffic};
use crate::rounds::{Run, Series};
use crate::verdict::{Candidate, ComparedRow, Question, Subject, Verdict};

/// The calls that a verdict can name, in the order of preference. Calls that lend memory are left
/// out: on a veth the kernel copies it.
pub(super) const CALLS: [SendCall; 3] = [SendCall::Segments, SendCall::Group, SendCall::Send];

/// The verdict on the calls that send datagrams.
pub(super) fn of(
    rows: &[Series<InterruptsCase, InterruptsRound>],
    run: &Run<'_>,
) -> Option<Verdict> {
    let compared: Vec<ComparedRow<'_, _, _>> = CALLS
        .into_iter()
        .filter_map(|call| {
            let series = rows.iter().find(|row| row.case.traffic == Traffic::Transmit(call))?;
            Some(ComparedRow { name: send_call_name(call).into(), series, obstacle: None })
        })
        .collect();
    if compared.len() < CALLS.len() {
        return None;
    }
    let baseline = send_call_name(SendCall::Send);
    let candidates = Candidate::of_rows(
        &compared,
        baseline,
        &InterruptsRound::sender_us_per_1000,
        Some(&InterruptsRound::both_us_per_1000),
    );
    let subject = Subject {
        question: Question::Packets,
        baseline,
        cost: "the sender's CPU",
        how,
        retry: run.longer_command("interrupts"),
        obstacle: run.obstacle(),
    };
    Some(subject.verdict(&candidates))
}

fn how(call: &str) -> Option<&'static str> {
    match call {
        "UDP_SEGMENT" => Some("setsockopt(UDP_SEGMENT)"),
        "sendmmsg" => Some("sendmmsg(2)"),
        _ => None,
    }
}
