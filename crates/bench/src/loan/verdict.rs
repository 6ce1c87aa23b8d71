//! The verdict of the experiment `loan`: whether to lend memory to the kernel or to copy it.

use super::{Destination, LoanCase, LoanMethod, LoanRound};
use crate::rounds::{Run, Series};
use crate::stats::Estimate;
use crate::verdict::{Confidence, Question, Verdict, ratio_text};
use haul_units::Size;
use haul_workers::worker::memory_sender::SendCall;

type LoanSeries = Series<LoanCase, LoanRound>;

/// The smallest share of the bytes that the kernel copies on a link where loans avoid no copy, in
/// percent.
const COPIED_PERCENT_MIN: f64 = 50.0;

/// The command that measures loans on a real network card.
pub(crate) const REAL_CARD: &str = "haul bench send --to HOST --paths read+send,zerocopy";

/// The verdict on loans of the largest size over TCP.
pub(super) fn of(rows: &[LoanSeries], run: &Run<'_>) -> Option<Verdict> {
    let (lend, send) = largest(rows, Destination::Tcp)?;
    let ratio_of = |cost: fn(&LoanRound) -> f64| {
        lend.ratio_with_deviation(send, Destination::Tcp.run_deviation(), cost)
    };
    let ratio = ratio_of(|round| round.costs.sender_us_per_mib);
    let withheld = |reason: &str| {
        Some(Verdict::withheld(Question::SendMemory, reason, run.longer_command("loan")))
    };
    if let Some(obstacle) = run.obstacle() {
        return withheld(&obstacle);
    }
    let Some(ratio) = ratio.filter(Estimate::is_conclusive) else {
        return withheld("too few usable rounds of loans over TCP");
    };
    let size = lend.case.piece;
    let copied_percent = copied_percent(lend)?;
    if copied_percent < COPIED_PERCENT_MIN {
        let both =
            ratio_of(|round| round.costs.sender_us_per_mib + round.costs.receiver_us_per_mib);
        return verdict_without_copies([ratio, both.unwrap_or(ratio)], size).or_else(|| {
            withheld(&format!("no difference between a loan and a send was shown at {size}"))
        });
    }
    let statement = copied_statement(copied_percent);
    Some(Verdict {
        confidence: Confidence::Certain,
        choice: Some("send".into()),
        how: Some(REAL_CARD.into()),
        ..Verdict::without_saving(Question::SendMemory, &statement)
    })
}

/// The statement on a link where the kernel copies loans.
pub(crate) fn copied_statement(copied_percent: f64) -> String {
    format!("send(2): MSG_ZEROCOPY copied {copied_percent:.0} % on this link")
}

/// The verdict on a link where loans avoid the copy, by the ratios of the sender's cost and of both
/// hosts'; `None` if no difference was shown.
fn verdict_without_copies([ratio, both]: [Estimate; 2], size: Size) -> Option<Verdict> {
    let is_certain = both.is_below(1.0) == ratio.is_below(1.0);
    let verdict = |choice: &str, how: &str, statement: &str| Verdict {
        confidence: if is_certain { Confidence::Certain } else { Confidence::Likely },
        choice: Some(choice.into()),
        baseline: Some("send".into()),
        how: Some(how.into()),
        ..Verdict::without_saving(Question::SendMemory, statement)
    };
    let statement =
        format!("MSG_ZEROCOPY takes {} the CPU time of a send at {size}", ratio_text(ratio));
    if ratio.is_below(1.0) && !both.is_above(1.0) {
        Some(Verdict {
            saving_percent: Some(crate::verdict::saving(ratio)),
            ..verdict("lend", "MSG_ZEROCOPY; in Rust haul::Sender::lend", &statement)
        })
    } else {
        ratio.is_above(1.0).then(|| verdict("send", "send(2)", &statement))
    }
}

/// The rows that lend and send pieces of the largest size that both were measured with.
fn largest(rows: &[LoanSeries], to: Destination) -> Option<(&LoanSeries, &LoanSeries)> {
    let row = |piece: Size, name: &str| {
        rows.iter().find(|row| {
            let LoanCase { destination, method, .. } = row.case;
            destination == to && row.case.piece == piece && method.name() == name
        })
    };
    let is_lent = |row: &&LoanSeries| row.case.method == LoanMethod::Memory(SendCall::Lend);
    let mut sizes: Vec<Size> = rows
        .iter()
        .filter(|row| is_lent(row) || row.case.method.name() == "lend")
        .filter(|row| row.case.destination == to && !row.rounds.is_empty())
        .map(|row| row.case.piece)
        .collect();
    sizes.sort_unstable();
    sizes.into_iter().rev().find_map(|size| Some((row(size, "lend")?, row(size, "send")?)))
}

/// The share of the lent bytes that the kernel copied; `None` if it reported none.
fn copied_percent(row: &LoanSeries) -> Option<f64> {
    let sum = |of: fn(&LoanRound) -> u64| {
        row.rounds.iter().map(|(_, round)| of(round)).sum::<u64>() as f64
    };
    let (copied, zero_copied) =
        (sum(|round| round.sent.copied_bytes), sum(|round| round.sent.zero_copied_bytes));
    (copied + zero_copied > 0.0).then(|| 100.0 * copied / (copied + zero_copied))
}
