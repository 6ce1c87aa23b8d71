//! From rounds to the rows of a report.

use super::{Measured, Round, Row, copies};
use crate::matrix::Cell;
use crate::site::Site;
use crate::stats::Figure;
use crate::way::Way;
use haul::Path;
use haul_lab::Offloads;

/// The row that a series comes to, beside all the others.
pub(super) fn row(series: &Measured, all: &[Measured], site: Site<'_>) -> Row {
    let Cell { path, condition } = &series.cell.cell;
    let copies = copies::copies_of(series);
    let has_receiver = site.has_two_hosts();
    let figure = |of: &dyn Fn(&Round) -> f64| series.figure(of);
    Row {
        path: path.name().into(),
        chunk_bytes: condition.chunk.0,
        workload: condition.workload.to_string(),
        cork: condition.cork,
        offloads: match condition.offloads {
            Offloads::On => "on".into(),
            Offloads::Off => "off".into(),
        },
        taken: taken(series),
        rounds: series.rounds.len(),
        refused: series.why_none(),
        copied_percent: copies.map(|copies| copies.percent),
        copied_known_by: copies.map(|copies| copies.known_by.into()),
        throughput_bits_per_second: figure(&|round| round.costs.bytes_per_second * 8.0),
        sender_load_percent: figure(&|round| round.costs.sender.load_percent),
        receiver_load_percent: figure(&|round| round.costs.receiver.load_percent).filter(|_| has_receiver),
        sender_us_per_mib: figure(&|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: figure(&|round| round.costs.receiver_us_per_mib).filter(|_| has_receiver),
        sender_interference_percent: series.figure_of_some(|round| round.costs.sender.interference_percent),
        receiver_interference_percent: series
            .figure_of_some(|round| round.costs.receiver.interference_percent)
            .filter(|_| has_receiver),
        rusage_us_per_mib: figure(&|round| round.rusage_us_per_mib),
        syscalls_per_mib: figure(&|round| round.syscalls_per_mib).map(|figure| figure.median),
        sender_us_ratio: ratio(series, all),
    }
}

/// The path that the choice took, or each of several where rounds differ.
fn taken(series: &Measured) -> Option<String> {
    if matches!(series.cell.cell.path, Way::Path(_)) {
        return None;
    }
    let mut taken: Vec<&str> =
        series.rounds.iter().filter_map(|(_, round)| Some(round.taken?.name())).collect();
    taken.sort_unstable();
    taken.dedup();
    (!taken.is_empty()).then(|| taken.join(", "))
}

/// The row's cost over that of the plain way under the same conditions, round by round.
fn ratio(series: &Measured, all: &[Measured]) -> Option<Figure> {
    let plain = [Path::ReadWrite, Path::ReadSend].map(Way::from).into_iter().find_map(|path| {
        all.iter().find(|other| {
            other.cell.cell.path == path
                && other.cell.cell.condition == series.cell.cell.condition
                && !other.rounds.is_empty()
        })
    })?;
    series.ratio_to(plain, |round| round.costs.sender_us_per_mib)
}
