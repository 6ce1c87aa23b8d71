//! The verdict of the experiment `send`: the method to send files with, and the one to send memory
//! with.

use super::copies::copied_share;
use super::rows::{preferred_methods, reason_for_pacing};
use super::{SendExperiment, SendRound, SendSeries};
use crate::matrix::SendCondition;
use crate::report::Observer;
use crate::rounds::Run;
use crate::verdict::{Candidate, ComparedRow, Question, Subject, Verdict};
use crate::warning::{Kind, Warning};
use haul::{Copying, SendMethod};
use haul_lab::Offloads;
use haul_units::Size;
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::Workload;

/// The largest share of bytes that a method may copy although it avoids copies, in percent.
const COPIED_PERCENT_MAX: f64 = 1.0;

/// The verdicts on files and on memory, each under the conditions nearest to the defaults, if the
/// baseline and another method were requested.
pub(super) fn of(
    rows: &[SendSeries],
    experiment: &SendExperiment<'_>,
    run: &Run<'_>,
    observer: Option<&Observer>,
) -> Vec<Verdict> {
    let verdict = |question: Question| {
        let is_memory = question == Question::SendMemory;
        let conditions = rows.iter().map(|row| &row.case.case.condition);
        let condition = conditions
            .filter(|condition| matches!(condition.workload, Workload::Memory(_)) == is_memory)
            .min_by_key(|condition| distance_from_defaults(condition))?;
        verdict_under(condition, question, rows, experiment, run, observer)
    };
    [Question::SendFiles, Question::SendMemory].into_iter().filter_map(verdict).collect()
}

/// A sort key: offloads on, no cork, the chunk nearest to 64 KiB.
fn distance_from_defaults(condition: &SendCondition) -> (bool, bool, u64) {
    let distance = (condition.chunk.0 as f64 / 65_536.0).log2().abs();
    (condition.offloads != Offloads::On, condition.cork, (distance * 1000.0) as u64)
}

fn verdict_under(
    condition: &SendCondition,
    question: Question,
    rows: &[SendSeries],
    experiment: &SendExperiment<'_>,
    run: &Run<'_>,
    observer: Option<&Observer>,
) -> Option<Verdict> {
    let of_method = |method: SendMethod| {
        rows.iter().find(|row| {
            row.case.case.condition == *condition && row.case.case.method == method.into()
        })
    };
    let baseline = [SendMethod::ReadWrite, SendMethod::ReadSend]
        .into_iter()
        .find(|&method| of_method(method).is_some())?;
    let floor = of_method(SendMethod::Floor).filter(|floor| !floor.rounds.is_empty());
    let compared: Vec<ComparedRow<'_, _, _>> = preferred_methods()
        .filter_map(|method| {
            let series = of_method(method)?;
            let obstacle = row_obstacle(series, floor);
            Some(ComparedRow { name: method.name().into(), series, obstacle })
        })
        .collect();
    if compared.len() < 2 {
        return None;
    }
    let both = |round: &SendRound| round.costs.sender_us_per_mib + round.costs.receiver_us_per_mib;
    let has_two_hosts = experiment.topology.has_two_hosts();
    let candidates = Candidate::of_rows(
        &compared,
        baseline.name(),
        &|round| round.costs.sender_us_per_mib,
        has_two_hosts.then_some(&both),
    );
    let subject = Subject {
        question,
        baseline: baseline.name(),
        cost: "the sender's CPU",
        how: if question == Question::SendMemory { memory_call } else { file_call },
        retry: run.longer_command("send"),
        obstacle: run.obstacle().or_else(|| observer_obstacle(observer)),
    };
    Some(subject.verdict(&candidates))
}

/// The reason why no verdict can name a method; `None` if one can.
fn row_obstacle(series: &SendSeries, floor: Option<&SendSeries>) -> Option<String> {
    let is_unexpected_copy = series.case.copying() != Copying::Always
        && copied_share(series).is_some_and(|copies| copies.percent > COPIED_PERCENT_MAX);
    let is_below_floor = || {
        let cost = |round: &SendRound| round.costs.sender_us_per_mib;
        floor
            .filter(|floor| floor.is_out_of_regime == series.is_out_of_regime)
            .and_then(|floor| series.ratio_to_method(floor, cost))
            .is_some_and(|ratio| ratio.is_below(1.0))
    };
    if is_unexpected_copy {
        Some("the kernel copied although the method avoids copies".into())
    } else if series.is_out_of_regime {
        Some("the receive window did not hold the sender back".into())
    } else if reason_for_pacing(series).is_some() {
        Some("timers paced the packets (measure with --congestion cubic)".into())
    } else if is_below_floor() {
        Some("it took less than the network stack alone, which is impossible".into())
    } else {
        None
    }
}

fn observer_obstacle(observer: Option<&Observer>) -> Option<String> {
    let effect = observer.filter(|observer| observer.is_beyond_limit())?;
    Some(format!(
        "the meter changes the throughput by {:+.0} %",
        100.0 * (effect.throughput_ratio.median - 1.0)
    ))
}

/// A warning if the meter changes the throughput.
pub(super) fn observer_warning(observer: &Observer) -> Option<Warning> {
    observer.is_beyond_limit().then(|| {
        let effect = 100.0 * (observer.throughput_ratio.median - 1.0);
        let detail =
            format!("with the meter the throughput differs by {effect:+.1} % from that without");
        Warning::new(Kind::Observer, detail)
    })
}

/// The call that sends a file by a method.
fn file_call(method: &str) -> Option<&'static str> {
    match method {
        "sendfile" => Some("sendfile(2); in Rust haul::Sender::send_file"),
        "splice" => Some("splice(2) through a pipe"),
        "mmap+send" => Some("mmap(2), then send(2)"),
        "read+send" => Some("read(2), then send(2)"),
        "read+write" => Some("read(2), then write(2)"),
        _ => None,
    }
}

/// The call that sends memory by a method.
fn memory_call(method: &str) -> Option<&'static str> {
    match method {
        "vmsplice" => {
            Some("in Rust haul::Sender::send_memory, for memory that never changes again")
        }
        "read+send" => Some("send(2)"),
        "read+write" => Some("write(2)"),
        _ => None,
    }
}

/// The condition of the verdict in words.
pub(super) fn subject(workload: &str, chunk_bytes: u64) -> String {
    format!("{workload} in chunks of {}", Size(chunk_bytes))
}

/// Whether a method can be a verdict's: the library may choose it.
pub(super) fn is_nameable(method: TestedMethod) -> bool {
    preferred_methods().any(|preferred| method == preferred.into())
}
