//! The verdict of the experiment `forward`: whether to copy or to splice.

use super::method::TestedForwardMethod;
use super::{ForwardCase, ForwardRound, Traffic};
use crate::rounds::{Run, Series};
use crate::verdict::{Candidate, ComparedRow, Question, Subject, Verdict, ratio_text};
use haul_units::Size;

/// The methods that the library chooses from, in the order of preference.
pub(super) const CANDIDATES: [TestedForwardMethod; 2] =
    [TestedForwardMethod::Splice, TestedForwardMethod::Copy];

/// The buffer of the verdict: a pipe that an ordinary user may set, and several large packets.
const BUFFER_BYTES: u64 = 256 << 10;

type ForwardSeries = Series<ForwardCase, ForwardRound>;

/// The verdict on bulk transfers, with what is known of the smallest messages.
pub(super) fn of(rows: &[ForwardSeries], run: &Run<'_>, has_two_hosts: bool) -> Option<Verdict> {
    let bulk = compared(rows, Traffic::Bulk);
    if bulk.len() < CANDIDATES.len() {
        return None;
    }
    let both = |round: &ForwardRound| round.cost() + round.costs.receiver_us_per_mib;
    let candidates = Candidate::of_rows(
        &bulk,
        TestedForwardMethod::Copy.name(),
        &ForwardRound::cost,
        has_two_hosts.then_some(&both),
    );
    let subject = Subject {
        question: Question::Forward,
        baseline: TestedForwardMethod::Copy.name(),
        cost: "the proxy's CPU",
        how,
        retry: run.longer_command("forward"),
        obstacle: run.obstacle(),
    };
    let mut verdict = subject.verdict(&candidates);
    if verdict.choice.is_some() {
        verdict.statement.push_str(&messages_clause(rows).unwrap_or_default());
    }
    Some(verdict)
}

/// The rows of one kind of traffic: of each method that with the buffer nearest to 256 KiB.
fn compared(
    rows: &[ForwardSeries],
    traffic: Traffic,
) -> Vec<ComparedRow<'_, ForwardCase, ForwardRound>> {
    let distance = |buffer: Option<Size>| {
        buffer.map_or(u32::MAX, |size| size.0.max(1).ilog2().abs_diff(BUFFER_BYTES.ilog2()))
    };
    let row = |method| {
        let series = rows
            .iter()
            .filter(|row| row.case.method == method && row.case.traffic == traffic)
            .min_by_key(|row| distance(row.case.buffer))?;
        let is_pipe_copied = method == TestedForwardMethod::Splice
            && series.rounds.iter().any(|(_, round)| round.forwarded.spliced_bytes == 0);
        let obstacle = is_pipe_copied.then(|| "it copied through a buffer".to_owned());
        Some(ComparedRow { name: method.name().into(), series, obstacle })
    };
    CANDIDATES.into_iter().filter_map(row).collect()
}

/// The cost of the smallest messages through a pipe, compared with that through a buffer.
fn messages_clause(rows: &[ForwardSeries]) -> Option<String> {
    let size = rows.iter().filter_map(|row| row.case.traffic.message_size()).min()?;
    let compared = compared(rows, Traffic::Messages(size));
    let [splice, copy] = compared.as_slice() else { return None };
    let ratio = splice.series.ratio_to_method(copy.series, ForwardRound::cost)?;
    Some(if ratio.is_below(1.0) || ratio.is_above(1.0) {
        format!("; with messages of {size} it takes {}", ratio_text(ratio))
    } else {
        format!("; with messages of {size} no difference was shown")
    })
}

fn how(method: &str) -> Option<&'static str> {
    match method {
        "splice" => Some("splice(2) through a pipe; in Rust haul::Forwarder"),
        "copy" => Some("read(2), then write(2)"),
        _ => None,
    }
}
