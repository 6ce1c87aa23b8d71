//! Views of reports: the common form from which the terminal, Markdown and HTML outputs are made.

use crate::host::HostFacts;
use crate::regime::Reading;
use crate::report::{Observer, Report};
use crate::rounds::RoundCost;
use crate::stats::{Estimate, RUN_TO_RUN_DEVIATION};
use crate::verdict::{Question, Verdict};
use haul_units::Rate;

/// A report as text, tables and bars.
#[derive(Debug, Clone)]
pub struct View {
    /// The command that makes the report.
    pub title: String,
    /// The answer to each question of the experiment.
    pub verdicts: Vec<Verdict>,
    /// Details of the answers in plain language, one sentence each.
    pub answers: Vec<String>,
    /// The machine and the lab, one line each.
    pub setting: Vec<String>,
    /// Classes of bars, and their meanings.
    pub legend: Vec<(&'static str, &'static str)>,
    /// The quantity that the bars show.
    pub unit: &'static str,
    /// Column headings. The first columns, of which the first holds the name, fit a narrow
    /// terminal.
    pub heads: Vec<&'static str>,
    /// Number of columns that a narrow terminal shows.
    pub narrow_columns: usize,
    /// Groups of comparable rows.
    pub groups: Vec<Group>,
    /// Drawings, for the HTML page.
    pub drawings: Vec<Drawing>,
    /// Notes on all figures.
    pub notes: Vec<String>,
    /// The settings of the rows, each with its command.
    pub advice: Vec<Advice>,
    /// Warnings of this run.
    pub warnings: Vec<String>,
}

/// A drawing.
#[derive(Debug, Clone)]
pub struct Drawing {
    /// Title of the drawing.
    pub title: String,
    /// The drawing as SVG that is safe to embed in a page.
    pub svg: String,
}

/// A group of comparable rows.
#[derive(Debug, Clone)]
pub struct Group {
    /// The conditions that the rows share.
    pub title: String,
    /// The rows, the cheapest first. Rows without figures are last.
    pub lines: Vec<Line>,
}

/// One row of a group.
#[derive(Debug, Clone)]
pub struct Line {
    /// The row's label, unique within its group.
    pub name: String,
    /// The reason why the row does not have figures.
    pub refused: Option<String>,
    /// One text per column.
    pub cells: Vec<String>,
    /// Its bars.
    pub bars: Vec<Bar>,
    /// Its part in a verdict.
    pub role: LineRole,
    /// Whether other programs ran in every window, so that the bars permit no conclusion.
    pub is_disturbed: bool,
}

/// The part of a row in a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineRole {
    /// A verdict recommends it.
    Choice,
    /// A verdict compares the others with it.
    Baseline,
    /// None.
    Other,
}

/// A change of a host's setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The setting and its value.
    pub setting: String,
    /// The command that makes it.
    pub command: String,
    /// Where it can be made without harm.
    pub safety: String,
    /// The risk.
    pub risk: String,
}

/// A bar with its interval.
#[derive(Debug, Clone)]
pub struct Bar {
    /// One of the legend's classes.
    pub class: &'static str,
    /// Its length.
    pub estimate: Estimate,
    /// Text next to the bar.
    pub remark: String,
    /// The value at which it has its full length.
    pub full: f64,
}

impl Bar {
    /// A bar if there is an estimate.
    pub(crate) fn of(
        class: &'static str,
        estimate: Option<Estimate>,
        remark: String,
    ) -> Option<Self> {
        estimate.map(|estimate| Self { class, estimate, remark, full: 1.0 })
    }
}

/// A column of a table: its heading, and the text of each row.
pub struct Column<R> {
    head: &'static str,
    text: fn(&R) -> String,
    is_narrow: bool,
}

impl<R> Column<R> {
    /// A column that is always shown. These come first.
    pub(crate) const fn narrow(head: &'static str, text: fn(&R) -> String) -> Self {
        Self { head, text, is_narrow: true }
    }

    /// The heading.
    pub(crate) const fn head(&self) -> &'static str {
        self.head
    }

    /// Whether the column is always shown.
    pub(crate) const fn is_narrow(&self) -> bool {
        self.is_narrow
    }

    /// A column that is shown if the terminal is wide enough.
    pub(crate) const fn wide(head: &'static str, text: fn(&R) -> String) -> Self {
        Self { head, text, is_narrow: false }
    }
}

/// A row that can be shown in a table.
pub trait TableRow: Sized + 'static {
    /// The columns, the narrow ones first.
    const COLUMNS: &'static [Column<Self>];
    /// Classes of bars, and their meanings.
    const LEGEND: &'static [(&'static str, &'static str)];
    /// The quantity that the bars show.
    const UNIT: &'static str;
    /// The meaning of the columns of a narrow terminal, in one paragraph.
    const COLUMNS_EXPLAINED: &'static str;
    /// The methods that the others of a group are compared with, the preferred one first.
    const BASELINES: &'static [&'static str] = &[];
    /// Standard deviation, from run to run, of the logarithm of the ratio of two rows. Source:
    /// docs/measurements/repeatability.md.
    const RUN_DEVIATION: f64 = RUN_TO_RUN_DEVIATION;
    /// Whether the rows of a group are sorted by their first bar, the shortest first.
    const IS_SORTED: bool = true;
    /// Whether bars of different classes have different units, and so separate scales.
    const HAS_SCALE_PER_CLASS: bool = false;

    /// The row's name within its group.
    fn name(&self) -> String;
    /// The name of the row's method, as a verdict names it.
    fn method(&self) -> String {
        self.name()
    }
    /// The unit of the row's cost in each round, without spaces.
    fn cost_unit(&self) -> &'static str {
        "cpu-us/MiB"
    }
    /// The unit of the other cost that each round has ([`RoundCost::other_host_cost`]).
    fn other_cost_unit(&self) -> String {
        format!("other-host-{}", self.cost_unit())
    }
    /// The row's cost in each round.
    fn round_costs(&self) -> &[RoundCost] {
        &[]
    }
    /// The title of the row's group: the conditions that it shares with others.
    fn group(&self) -> String;
    /// Scale of the bars. Bars of groups with the same scale can be compared by their lengths.
    fn axis_key(&self) -> u64 {
        0
    }
    /// Number of rounds measured.
    fn round_count(&self) -> usize;
    /// Whether other programs ran in every window, so that the row permits no conclusion.
    fn is_disturbed(&self) -> bool {
        false
    }
    /// Whether the answer to a question is about the conditions of the row.
    fn answers(&self, _question: Question) -> bool {
        true
    }
    /// The reason why the row was not measured.
    fn refusal_reason(&self) -> Option<&str>;
    /// The row's bars.
    fn bars(&self) -> Vec<Bar>;
    /// The settings of the rows, each with its command.
    fn advice(_rows: &[Self]) -> Vec<Advice> {
        Vec::new()
    }
    /// Notes on the rows.
    fn notes(_rows: &[Self]) -> Vec<String> {
        Vec::new()
    }
}

impl<R: TableRow> Report<R> {
    /// Makes the view of the report.
    pub fn view(&self) -> View {
        View {
            title: format!("haul bench {}", self.experiment),
            verdicts: self.verdicts.clone(),
            answers: self.answers.clone(),
            setting: setting(self),
            legend: R::LEGEND.to_vec(),
            unit: R::UNIT,
            heads: R::COLUMNS.iter().map(|column| column.head).collect(),
            narrow_columns: R::COLUMNS.iter().filter(|column| column.is_narrow).count(),
            groups: groups(&self.rows, &self.verdicts),
            drawings: Vec::new(),
            notes: std::iter::once(R::COLUMNS_EXPLAINED.to_owned())
                .chain(self.observer.iter().map(observer))
                .chain(R::notes(&self.rows))
                .collect(),
            advice: R::advice(&self.rows),
            warnings: self.warnings.iter().map(|warning| warning.detail.clone()).collect(),
        }
    }
}

/// Groups comparable rows under their shared conditions, and sorts them by their first bar.
pub(crate) fn groups<R: TableRow>(rows: &[R], verdicts: &[Verdict]) -> Vec<Group> {
    // In a stopped run some rows do not have rounds; they are left out.
    let shown =
        || rows.iter().filter(|row| row.round_count() > 0 || row.refusal_reason().is_some());
    let full = |scale: u64, class: &str| {
        let is_on_scale = |bar: &Bar| !R::HAS_SCALE_PER_CLASS || bar.class == class;
        let bars = shown().filter(|row| row.axis_key() == scale).flat_map(TableRow::bars);
        let length = |bar: Bar| {
            if bar.estimate.has_interval() { bar.estimate.high } else { bar.estimate.median }
        };
        bars.filter(is_on_scale).map(length).fold(f64::MIN_POSITIVE, f64::max)
    };
    let role = |row: &R| {
        let is_named = |name: &Option<String>| name.as_ref() == Some(&row.method());
        let mut verdicts = verdicts.iter().filter(|verdict| row.answers(verdict.question));
        if verdicts.clone().any(|verdict| is_named(&verdict.choice)) {
            LineRole::Choice
        } else if verdicts.any(|verdict| is_named(&verdict.baseline)) {
            LineRole::Baseline
        } else {
            LineRole::Other
        }
    };
    let mut groups: Vec<Group> = Vec::new();
    for row in shown() {
        let mark = if row.is_disturbed() { ", disturbed" } else { "" };
        let mut cells: Vec<String> = R::COLUMNS.iter().map(|column| (column.text)(row)).collect();
        if let Some(name) = cells.first_mut() {
            name.push_str(mark);
        }
        let line = Line {
            name: row.name() + mark,
            refused: row.refusal_reason().map(str::to_owned),
            cells,
            bars: row
                .bars()
                .into_iter()
                .map(|bar| Bar { full: full(row.axis_key(), bar.class), ..bar })
                .collect(),
            role: role(row),
            is_disturbed: row.is_disturbed(),
        };
        let title = row.group();
        match groups.iter_mut().find(|group| group.title == title) {
            Some(group) => group.lines.push(line),
            None => groups.push(Group { title, lines: vec![line] }),
        }
    }
    if R::IS_SORTED {
        for group in &mut groups {
            sort(&mut group.lines);
        }
    }
    groups
}

/// Sorts rows by the length of their first bar. Rows without bars are last.
fn sort(lines: &mut [Line]) {
    let cost = |line: &Line| line.bars.first().map_or(f64::INFINITY, |bar| bar.estimate.median);
    lines.sort_by(|one, other| cost(one).total_cmp(&cost(other)));
}

/// One line about the machine and one about the lab.
fn setting<R>(report: &Report<R>) -> Vec<String> {
    let host = &report.host;
    let machine_line = format!("haul {} on {}, {}", report.haul, machine(host), report.started);
    let lab_line = report.lab.as_ref().map(|lab| {
        let distance = lab
            .cache_line_round_trip_ns
            .map_or(String::new(), |trip| format!(" ({:.0} ns apart)", trip.median));
        let rate = match (lab.rate_bits_per_second, lab.reading) {
            (Some(rate), _) => format!("held at {}", Rate(rate)),
            (None, Some(Reading::Held)) => "held by the receiver".into(),
            (None, _) => "full speed".into(),
        };
        let hosts = match (lab.sender_cpu, lab.receiver_cpu, &lab.peer) {
            (Some(sender), Some(receiver), _) => {
                format!("sender on CPU {sender}, receiver on CPU {receiver}{distance}")
            }
            (.., Some(peer)) => format!(
                "peer {} on {}; loads are sums over a machine's CPUs",
                peer.address,
                machine(&peer.host)
            ),
            _ => "two machines".into(),
        };
        format!("{}: {hosts}, MTU {}, {}, {rate}", lab.kind, lab.mtu, lab.congestion)
    });
    [machine_line].into_iter().chain(lab_line).collect()
}

fn machine(host: &HostFacts) -> String {
    let cpus = if host.cpus == 1 { "1 CPU".into() } else { format!("{} CPUs", host.cpus) };
    let zeroing = match host.zeroes_new_pages {
        Some(true) => ", new pages zeroed",
        _ => "",
    };
    format!("Linux {}, {}, {cpus}{zeroing}", host.kernel, host.cpu)
}

/// One line on the observer effect.
fn observer(observer: &Observer) -> String {
    let ratio = observer.throughput_ratio;
    let (low, high) = (100.0 * (ratio.low - 1.0), 100.0 * (ratio.high - 1.0));
    let interval = if ratio.has_interval() {
        format!("{low:+.1} to {high:+.1}")
    } else {
        "no interval".into()
    };
    let known = if observer.is_known { "" } else { "; not known within 3 %" };
    format!(
        "The meter's own effect: with it the throughput of {} differs by {:+.1} % ({interval}, \
         {} pairs{known}).",
        observer.path,
        100.0 * (ratio.median - 1.0),
        observer.pairs
    )
}

/// A remark on a row that copied although its method avoids copies.
pub(crate) fn copied_after_all(percent: Option<f64>) -> String {
    percent
        .filter(|&percent| percent > 1.0)
        .map_or(String::new(), |percent| format!("copied {percent:.0} %"))
}

pub(crate) fn number(estimate: Option<Estimate>, unit: f64, digits: usize) -> String {
    estimate.map_or("?".into(), |estimate| format!("{:.digits$}", estimate.median / unit))
}

/// A speed in Gbit/s; empty if there is none.
pub(crate) fn speed(bits_per_second: Option<f64>) -> String {
    bits_per_second.map_or(String::new(), |bits| format!("{:.1}", bits / 1e9))
}

pub(crate) fn interval(estimate: Option<Estimate>) -> String {
    estimate.filter(Estimate::has_interval).map_or("?".into(), |estimate| estimate.interval(0))
}

pub(crate) fn ratio(estimate: Option<Estimate>) -> String {
    estimate.map_or("?".into(), |estimate| {
        if estimate.has_interval() {
            format!("{:.2} ({:.2}–{:.2})", estimate.median, estimate.low, estimate.high)
        } else {
            format!("{:.2} (?)", estimate.median)
        }
    })
}

pub(crate) fn share(percent: Option<f64>) -> String {
    percent.map_or("?".into(), |percent| format!("{percent:.0}"))
}
