//! The experiment `loan`: from which size on lending memory to the kernel costs less than having it copied, what waiting
//! for each loan costs, and what lending gains over `sendfile`.
//!
//! Two destinations. On the veth the bytes arrive, and the kernel copies what was lent after all, because the other host
//! might keep it: the rows say so, and show what that costs. The other device takes packets as a network card does and
//! drops them: there what is lent is really not copied, so it shows what lending is worth where it works. TCP needs a
//! peer that answers, so only datagrams go there.

use crate::endpoint::Endpoint;
use crate::flow::{Flow, FlowError, Part, Sample, WARM_UP};
use crate::quantity::Size;
use crate::regime::{self, FullSpeeds, Reading};
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::tested_method::TestedMethod;
use crate::topology::Loads;
use crate::worker::giver::{Beat, Giving, Hand};
use crate::worker::{Outcome, Task, receiver::Receiving, sender::Sending, taker::Taking};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion};
use haul::SendMethod;
use haul_lab::{Lab, Settings};
use haul_soak::Meter;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

mod answer;
mod row;

pub use row::LoanRow;

/// The result of `loan`.
pub type LoanReport = crate::report::Report<LoanRow>;

/// What a datagram carries at MTU 9000 after the headers of IPv4 and UDP.
const DATAGRAM_BYTES: u16 = 8972;
/// What one call can send as datagrams that are cut: seven of them fit 64 KiB.
const CUT_BYTES: Size = Size(7 * DATAGRAM_BYTES as u64);
/// How often so much goes to the other host, half a Gbit/s in all: at full speed most would be dropped on the way, and what
/// is dropped early costs less.
const BATCHES_PER_SECOND: u32 = 1000;
/// The discard service's port; nobody listens there.
const PORT: u16 = 9;
/// The largest piece that can be asked for.
const PIECE_MAX: Size = Size(4 << 20);

/// Where it goes, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum To {
    /// A stream to the other host.
    Tcp,
    /// Datagrams to the other host.
    Udp,
    /// Datagrams to a device that drops them.
    Sink,
}

/// How memory is given to the kernel, or a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum By {
    Hand(Hand),
    Sendfile,
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LoanCase {
    to: To,
    by: By,
    piece: Size,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct LoanPlan {
    /// Sizes of a loan.
    pub pieces: Vec<Size>,
    /// How often and how long.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

impl LoanPlan {
    /// From less than a page to a MiB.
    pub fn new(pace: Pace) -> Self {
        let pieces = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20].map(Size);
        Self { pieces: pieces.into(), pace, congestion: None }
    }

    /// A quick look: two sizes.
    pub fn quick(pace: Pace) -> Self {
        Self { pieces: [4 << 10, 64 << 10].map(Size).into(), ..Self::new(pace) }
    }

    fn cases(&self) -> Vec<LoanCase> {
        let mut cases = Vec::new();
        let mut pieces = self.pieces.clone();
        pieces.sort();
        for to in [To::Tcp, To::Udp, To::Sink] {
            for &piece in &pieces {
                let fits = |hand: Hand| match to {
                    To::Tcp => Some(By::Hand(hand)),
                    // Larger ones are cut by the device, up to what one call takes.
                    _ if piece.0 <= DATAGRAM_BYTES.into() => Some(By::Hand(hand)),
                    _ => match hand {
                        Hand::Send => Some(By::Hand(Hand::Segments)),
                        Hand::Lend => Some(By::Hand(Hand::LendSegments)),
                        _ => None,
                    },
                };
                let hands =
                    [Hand::Send, Hand::Lend, Hand::LendAndWait].into_iter().filter_map(fits);
                let sendfile = (to == To::Tcp).then_some(By::Sendfile);
                let size = if to == To::Tcp { piece } else { piece.min(CUT_BYTES) };
                for by in hands.chain(sendfile) {
                    let case = LoanCase { to, by, piece: size };
                    if !cases.contains(&case) {
                        cases.push(case);
                    }
                }
            }
        }
        cases
    }
}

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then reported.
pub fn run(
    plan: &LoanPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<LoanReport, BenchError> {
    plan.pace.check()?;
    if let Some(piece) = plan.pieces.iter().find(|piece| !(Size(1)..=PIECE_MAX).contains(piece)) {
        return Err(BenchError::BadInput(format!("piece {piece} is outside 1B to {PIECE_MAX}")));
    }
    let started = crate::now();
    let lab = Lab::open(&Settings::default())?;
    let congestion = congestion::choose(&lab, plan.congestion.as_deref())?;
    let mut run = Run::new(&lab, plan.pace)?;
    let sink = lab
        .add_sink()
        .map(|address| SocketAddr::new(address, PORT))
        .map_err(|error| error.to_string());
    let file = Workload::Files { count: 1, average: PIECE_MAX }.open()?;
    let mut loans = Loans {
        lab: &lab,
        sink,
        file,
        congestion,
        pace: plan.pace,
        full_speeds: FullSpeeds::default(),
    };
    let mut rows: Vec<Series<LoanCase, LoanRound>> =
        plan.cases().into_iter().map(Series::new).collect();
    let mut steps = Steps::new(run.steps(rows.len()), is_stopped, progress);
    run.all(&mut loans, &mut rows, &mut steps)?;
    run.warn(&rows, LoanCase::to_string, |round| round.costs.sender_us_per_mib);
    let row = |series: &Series<LoanCase, LoanRound>| LoanRow {
        full_speed_bits_per_second: loans.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows)
    };
    let rows = rows.iter().map(row).collect();
    let mut report = LoanReport::of_run("loan", started, run, &loans.congestion, None, rows);
    report.answers = answer::of(&report);
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct LoanRound {
    costs: Costs,
    sent: Outcome,
    /// Of the bytes that were sent.
    delivered: f64,
}

struct Loans<'a> {
    lab: &'a Lab,
    /// An address behind the device that drops packets, or why there is none.
    sink: Result<SocketAddr, String>,
    file: Opened,
    congestion: String,
    pace: Pace,
    full_speeds: FullSpeeds<LoanCase>,
}

impl Subject for Loans<'_> {
    type Case = LoanCase;
    type Round = LoanRound;

    fn name(&self, case: &LoanCase) -> String {
        case.by.name().into()
    }

    fn measure(&mut self, case: &LoanCase, meter: &Meter) -> Result<Sample, FlowError> {
        let to = match case.to {
            To::Sink => Some(self.sink.clone().map_err(FlowError::Refused)?),
            _ => None,
        };
        let giver = match case.by {
            By::Sendfile => Task::Send(Sending {
                path: TestedMethod::from(SendMethod::Sendfile).name().into(),
                chunk_bytes: case.piece.0 as usize,
                cork: false,
                rate_bits_per_second: None,
                pieces: self.file.handed_over(),
                plan: None,
            }),
            By::Hand(by) => Task::Give(Giving {
                is_tcp: case.to == To::Tcp,
                by,
                piece_bytes: case.piece.0 as usize,
                datagram_bytes: DATAGRAM_BYTES,
                to,
                beat: match case.to {
                    To::Udp => Beat::Batches {
                        pieces: (CUT_BYTES.0 / case.piece.0).max(1) as u32,
                        per_second: BATCHES_PER_SECOND,
                    },
                    _ => Beat::Free,
                },
            }),
        };
        let (lab, window) = (self.lab, self.pace.window);
        let socket = Reading::Held.socket(&self.congestion);
        let flow = |taker: Option<Task>| {
            let taker = taker.map(|task| Part { host: Endpoint::Lab(&lab.receiver), task });
            let giver = Part { host: Endpoint::Lab(&lab.sender), task: giver.clone() };
            let parts = taker.into_iter().chain([giver]).collect();
            Flow { parts, socket: socket.clone(), warm_up: WARM_UP, window }
        };
        match case.to {
            To::Tcp => {
                let receiving = |receiving| flow(Some(Task::Receive(receiving)));
                let full_speed = self.full_speeds.of(case, &receiving(Receiving::plainly()))?;
                let warm_up = regime::warm_up(full_speed);
                Flow { warm_up, ..receiving(regime::held(&Receiving::plainly(), full_speed)) }
            }
            To::Udp => flow(Some(Task::Take(Taking { busy_poll_us: 0 }))),
            To::Sink => flow(None),
        }
        .run(Some(meter))
    }

    fn costs(round: &LoanRound) -> Option<&Costs> {
        Some(&round.costs)
    }

    fn judge(&self, _: &LoanCase, sample: &Sample, loads: &Loads) -> Option<LoanRound> {
        let (sent, taken) = (sample.outcomes.last()?, sample.outcomes.first()?);
        let costs = Costs::of(loads, sent.bytes_per_second())?;
        Some(LoanRound {
            costs,
            sent: *sent,
            delivered: taken.bytes_per_second() / sent.bytes_per_second(),
        })
    }
}

impl By {
    fn name(self) -> &'static str {
        match self {
            Self::Hand(Hand::Send | Hand::Group | Hand::Segments) => "send",
            Self::Hand(Hand::Lend | Hand::LendSegments) => "lend",
            Self::Hand(Hand::LendAndWait) => "lend, waiting for each",
            Self::Sendfile => "sendfile",
        }
    }
}

impl To {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sink => "udp to a sink",
        }
    }
}

impl fmt::Display for LoanCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {} {}", self.to.name(), self.piece, self.by.name())
    }
}
