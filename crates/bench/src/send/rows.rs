//! From rounds to the rows of a report.

use super::{Observer, Report, Round, Run, Series, copies};
use crate::answer;
use crate::matrix::Cell;
use crate::report::{LabFacts, Row, SCHEMA};
use crate::stats::Figure;
use crate::way::Way;
use haul::Path;
use haul_lab::Offloads;

impl Run<'_> {
    pub(super) fn into_report(mut self, started: String, observer: Option<Observer>) -> Report {
        self.warn(observer.as_ref());
        let rows: Vec<Row> = self.series.iter().map(|series| self.row(series)).collect();
        let mut report = Report {
            schema: SCHEMA.into(),
            experiment: "send".into(),
            started,
            haul: env!("CARGO_PKG_VERSION").into(),
            host: self.host.clone(),
            lab: LabFacts {
                kind: match self.lab.kind() {
                    haul_lab::Kind::Veth => "veth".into(),
                    haul_lab::Kind::Loopback => "loopback".into(),
                },
                mtu: self.lab.mtu(),
                congestion: self.congestion.clone(),
                rate_bits_per_second: self.plan.rate.map(|rate| rate.0),
                sender_cpu: self.lab.sender.cpu(),
                receiver_cpu: self.lab.receiver.cpu(),
                cache_line_round_trip_ns: Figure::of(&self.round_trips_ns),
            },
            rows,
            observer,
            answers: Vec::new(),
            warnings: self.warnings,
        };
        report.answers = answer::of(&report);
        report
    }

    fn row(&self, series: &Series) -> Row {
        let Cell { path, condition } = &series.cell;
        let copies = copies::copies_of(series);
        let has_receiver = self.lab.sender.cpu() != self.lab.receiver.cpu();
        let figure = |of: &dyn Fn(&Round) -> f64| series.figure(of);
        let interference = |of: &dyn Fn(&Round) -> Option<f64>| {
            Figure::of(&series.rounds.iter().filter_map(of).collect::<Vec<_>>())
        };
        Row {
            path: path.name().into(),
            chunk_bytes: condition.chunk.0,
            workload: condition.workload.to_string(),
            cork: condition.cork,
            offloads: match condition.offloads {
                Offloads::On => "on".into(),
                Offloads::Off => "off".into(),
            },
            rounds: series.rounds.len(),
            refused: series
                .refused
                .clone()
                .or_else(|| series.failures.last().filter(|_| series.rounds.is_empty()).cloned()),
            copied_percent: copies.map(|copies| copies.percent),
            copied_known_by: copies.map(|copies| copies.known_by.into()),
            throughput_bits_per_second: figure(&|round| round.throughput_bits_per_second),
            sender_load_percent: figure(&|round| round.sender.load_percent),
            receiver_load_percent: figure(&|round| round.receiver.load_percent).filter(|_| has_receiver),
            sender_us_per_mib: figure(&|round| round.sender_us_per_mib),
            receiver_us_per_mib: figure(&|round| round.receiver_us_per_mib).filter(|_| has_receiver),
            sender_interference_percent: interference(&|round| round.sender.interference_percent),
            receiver_interference_percent: interference(&|round| round.receiver.interference_percent)
                .filter(|_| has_receiver),
            rusage_us_per_mib: figure(&|round| round.rusage_us_per_mib),
            syscalls_per_mib: figure(&|round| round.syscalls_per_mib).map(|figure| figure.median),
            sender_us_ratio: self.ratio(series),
        }
    }

    /// The row's cost over that of the plain way under the same conditions, round by round.
    fn ratio(&self, series: &Series) -> Option<Figure> {
        let plain = [Path::ReadWrite, Path::ReadSend].map(Way::from).into_iter().find_map(|path| {
            self.series.iter().find(|other| {
                other.cell.path == path
                    && other.cell.condition == series.cell.condition
                    && !other.rounds.is_empty()
            })
        })?;
        let ratios: Vec<f64> = series
            .rounds
            .iter()
            .filter_map(|round| {
                let same = plain.rounds.iter().find(|other| other.number == round.number)?;
                Some(round.sender_us_per_mib / same.sender_us_per_mib)
            })
            .collect();
        Figure::of(&ratios)
    }
}
