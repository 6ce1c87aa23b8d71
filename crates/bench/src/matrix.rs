//! The rows of the experiment `send`: combinations of methods and conditions.

use crate::error::BenchError;
use haul::SendMethod;
use haul_lab::Offloads;
use haul_units::Size;
use haul_workers::ring_method::RingMethod;
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::{Opened, Workload};

/// A set of rows: every combination of the listed conditions and methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendSelection {
    /// The send methods.
    pub paths: Vec<TestedMethod>,
    /// The chunk sizes.
    pub chunks: Vec<Size>,
    /// The workloads.
    pub workloads: Vec<Workload>,
    /// `TCP_CORK`: off, on, or both.
    pub corks: Vec<bool>,
    /// Offloads: on, off, or both.
    pub offloads: Vec<Offloads>,
    /// Sizes of both sockets' buffers; `None` for the size that the reading takes.
    pub buffers: Vec<Option<Size>>,
}

/// The conditions of a row, apart from its method. Rows of equal conditions can be compared.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SendCondition {
    /// The workload.
    pub workload: Workload,
    /// The most bytes that one call sends.
    pub chunk: Size,
    /// Whether `TCP_CORK` is set.
    pub cork: bool,
    /// The sending device's offloads.
    pub offloads: Offloads,
    /// Size of both sockets' buffers; `None` for the size that the reading takes. The buffers limit
    /// the bytes in flight.
    pub buffers: Option<Size>,
}

/// One row: a method under conditions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SendCase {
    /// The send method, or the choice of one.
    pub method: TestedMethod,
    /// The conditions.
    pub condition: SendCondition,
}

/// 64 KiB, the chunk of the original measurement.
pub const CHUNK_DEFAULT: Size = Size(64 * 1024);

impl SendSelection {
    /// Every method, 64 KiB chunks, 63 files averaging 350 kB, no cork, offloads on.
    pub fn plain() -> Self {
        Self {
            paths: TestedMethod::all(),
            chunks: vec![CHUNK_DEFAULT],
            workloads: vec![Workload::USUAL],
            corks: vec![false],
            offloads: vec![Offloads::On],
            buffers: vec![None],
        }
    }

    /// The default rows of `haul bench send`. The original table: every method with offloads on and
    /// off, and `TCP_CORK` with the classic ones. In addition, common methods with a small and a
    /// large chunk, and memory.
    pub fn default_set() -> Vec<Self> {
        let files: Vec<TestedMethod> =
            [SendMethod::ReadWrite, SendMethod::ReadSend, SendMethod::Sendfile, SendMethod::Splice]
                .map(TestedMethod::from)
                .into();
        let with_auto = |methods: &[TestedMethod]| [methods, &[TestedMethod::Auto]].concat();
        let memory = [
            SendMethod::ReadSend.into(),
            SendMethod::Vmsplice.into(),
            SendMethod::Zerocopy.into(),
            TestedMethod::Ring(RingMethod::Send),
            TestedMethod::Ring(RingMethod::Zerocopy),
        ];
        vec![
            Self { offloads: vec![Offloads::On, Offloads::Off], ..Self::plain() },
            Self { paths: files[..3].to_vec(), corks: vec![true], ..Self::plain() },
            Self {
                paths: with_auto(&files),
                chunks: vec![Size(4 << 10), Size(1 << 20)],
                ..Self::plain()
            },
            Self {
                paths: with_auto(&memory),
                workloads: vec![Workload::Memory(Size(16 << 20))],
                ..Self::plain()
            },
        ]
    }

    /// The rows, ordered by conditions first, so that comparable rows are neighbours.
    fn cases(&self) -> impl Iterator<Item = SendCase> {
        self.conditions().flat_map(|condition| {
            self.paths
                .iter()
                .map(move |&method| SendCase { method, condition: condition.clone() })
                .collect::<Vec<_>>()
        })
    }

    fn conditions(&self) -> impl Iterator<Item = SendCondition> {
        self.offloads.iter().flat_map(move |&offloads| {
            self.workloads.iter().flat_map(move |workload| {
                self.chunks.iter().flat_map(move |&chunk| {
                    self.corks.iter().flat_map(move |&cork| {
                        self.buffers.iter().map(move |&buffers| SendCondition {
                            workload: workload.clone(),
                            chunk,
                            cork,
                            offloads,
                            buffers,
                        })
                    })
                })
            })
        })
    }
}

/// Every row of several selections, each once.
pub fn cases(selections: &[SendSelection]) -> Vec<SendCase> {
    let mut cases: Vec<SendCase> = Vec::new();
    for case in selections.iter().flat_map(SendSelection::cases) {
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    // Switching offloads is the one change that disturbs the lab, so it happens once a round.
    cases.sort_by_key(|case| case.condition.offloads);
    cases
}

/// The largest accepted chunk: methods keep a few chunks in memory.
const CHUNK_MAX: Size = Size(64 << 20);

/// Rejects chunks of no bytes and chunks that are too large.
pub fn check_chunk(chunk: Size) -> Result<(), BenchError> {
    if chunk.0 == 0 {
        return Err(BenchError::BadInput("chunk 0 would send nothing: use 4KiB or more".into()));
    }
    if chunk > CHUNK_MAX {
        return Err(BenchError::BadInput(format!("chunk {chunk} is larger than {CHUNK_MAX}")));
    }
    Ok(())
}

/// Rejects chunks that the workload cannot fill.
pub fn check_chunk_in(chunk: Size, workload: &Opened) -> Result<(), BenchError> {
    let largest = workload.largest();
    if chunk > largest {
        return Err(BenchError::BadInput(format!(
            "chunk {chunk} is larger than the largest file of workload {name} ({largest})",
            name = workload.name
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_selections_give_each_row_once() {
        let one = cases(&[SendSelection::plain()]);
        assert_eq!(one.len(), TestedMethod::all().len());
        assert_eq!(cases(&[SendSelection::plain(), SendSelection::plain()]), one);
    }

    #[test]
    fn rows_are_sorted_so_that_offloads_switch_once() {
        let cases = cases(&SendSelection::default_set());
        let switches = cases
            .windows(2)
            .filter(|pair| pair[0].condition.offloads != pair[1].condition.offloads)
            .count();
        assert_eq!(switches, 1);
    }
}
