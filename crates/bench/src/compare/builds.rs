//! The comparison of two builds of haul, from rows that were measured in the same rounds.

use super::{Comparison, Finding, RowComparison, SCHEMA, Side};
use crate::error::BenchError;
use crate::rounds::Progress;
use crate::send::SendParameters;
use crate::send::builds::{BuildRow, BuildRows, measure};
use crate::view::TableRow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Measures the rows of `parameters` with both builds. A ratio above 1 means that the second build
/// costs more.
pub fn builds(
    programs: &[PathBuf; 2],
    parameters: &SendParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Comparison, BenchError> {
    let measured = measure(programs, parameters, is_stopped, progress)?;
    Ok(Comparison {
        schema: SCHEMA.into(),
        a: side(&programs[0], &measured),
        b: side(&programs[1], &measured),
        is_interleaved: true,
        differences: Vec::new(),
        rows: measured.rows.iter().map(row).collect(),
        not_in_both: Vec::new(),
        unmeasured: Vec::new(),
        warnings: measured.warnings,
    })
}

fn side(program: &Path, measured: &BuildRows) -> Side {
    Side {
        name: program.display().to_string(),
        started: measured.started.clone(),
        haul: String::new(),
        commit: String::new(),
        command: haul_version::command_line(),
        host: measured.host.clone(),
        lab: Some(measured.lab.clone()),
    }
}

fn row(measured: &BuildRow) -> RowComparison {
    let BuildRow { row, other_cost, ratio, joint_ratio, refused } = measured;
    RowComparison {
        experiment: "send".into(),
        group: row.group(),
        name: row.name(),
        compared_with: None,
        a: row.sender_us_per_mib,
        b: *other_cost,
        ratio: *ratio,
        finding: Finding::of(*ratio, *joint_ratio),
        refused: refused.clone(),
    }
}
