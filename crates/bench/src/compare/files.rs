//! Reads the reports of a run: a folder of JSON files, or one of them.

use super::{MeasuredRow, Side};
use crate::checksum::ChecksumRow;
use crate::forward::ForwardRow;
use crate::interrupts::InterruptsRow;
use crate::loan::LoanRow;
use crate::receive::ReceiveRow;
use crate::report::{Report, SCHEMA};
use crate::send::SendRow;
use crate::settings::SettingRow;
use crate::view::TableRow;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest report that is read, in bytes. The largest one that haul writes is a hundredth of
/// it.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The reports of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunReports {
    pub(super) side: Side,
    pub(super) rows: Vec<MeasuredRow>,
}

/// Why a run could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The underlying error.
        error: io::Error,
    },
    /// A file is not a report.
    #[error("{path} is not a report of haul bench: {problem}", path = path.display())]
    Malformed {
        /// The path.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// A folder holds no report.
    #[error("{path} has no report of haul bench", path = path.display())]
    Empty {
        /// The path.
        path: PathBuf,
    },
}

/// Reads a run: a folder that `haul bench` wrote, or a JSON report.
pub fn load(path: &Path) -> Result<RunReports, LoadError> {
    if !path.is_dir() {
        return read(path)?.ok_or_else(|| LoadError::Malformed {
            path: path.into(),
            problem: "it has no rows that can be compared".into(),
        });
    }
    let failed = |error| LoadError::File { path: path.into(), error };
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        // The summary has no rows.
        let is_report = file.extension().is_some_and(|extension| extension == "json")
            && file.file_name().is_some_and(|name| name != "summary.json");
        files.extend(is_report.then_some(file));
    }
    files.sort();
    let mut reports = files.iter().filter_map(|file| read(file).transpose());
    let mut first = reports.next().ok_or_else(|| LoadError::Empty { path: path.into() })??;
    for report in reports {
        let report = report?;
        first.side.lab = first.side.lab.take().or(report.side.lab);
        first.rows.extend(report.rows);
    }
    first.side.name = path.display().to_string();
    Ok(first)
}

/// Reads one report; `None` if it belongs to an experiment whose rows cannot be compared.
fn read(path: &Path) -> Result<Option<RunReports>, LoadError> {
    #[derive(Deserialize)]
    struct Head {
        schema: String,
        experiment: String,
    }
    let failed = |error| LoadError::File { path: path.into(), error };
    let malformed = |problem: String| LoadError::Malformed { path: path.into(), problem };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    let head: Head = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
    if head.schema != SCHEMA {
        return Err(malformed(format!(
            "its schema is {:?}, and this version reads {SCHEMA:?}",
            head.schema
        )));
    }
    let name = path.display().to_string();
    let reports = match head.experiment.as_str() {
        "send" => parse::<SendRow>(&text, &name),
        "receive" => parse::<ReceiveRow>(&text, &name),
        "forward" => parse::<ForwardRow>(&text, &name),
        "interrupts" => parse::<InterruptsRow>(&text, &name),
        "settings" => parse::<SettingRow>(&text, &name),
        "loan" => parse::<LoanRow>(&text, &name),
        "checksum" => parse::<ChecksumRow>(&text, &name),
        _ => return Ok(None),
    };
    reports.map(Some).map_err(malformed)
}

fn parse<R: TableRow + DeserializeOwned>(text: &str, name: &str) -> Result<RunReports, String> {
    let report: Report<R> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let rows = MeasuredRow::all(&report);
    if rows.is_empty() {
        return Err("it has no costs of rounds: measure again with this version".into());
    }
    let side = Side {
        name: name.into(),
        started: report.started,
        haul: report.haul,
        commit: report.commit,
        command: report.command,
        host: report.host,
        lab: report.lab,
    };
    Ok(RunReports { side, rows })
}
