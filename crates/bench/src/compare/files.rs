//! Reads the reports of a run: a folder of JSON files, or one of them.

use super::{MeasuredRow, Side};
use crate::checksum::ChecksumRow;
use crate::copies::CopiesRow;
use crate::forward::ForwardRow;
use crate::interrupts::InterruptsRow;
use crate::loan::LoanRow;
use crate::receive::ReceiveRow;
use crate::report::{LabFacts, Report, SCHEMA};
use crate::rounds::Noise;
use crate::send::SendRow;
use crate::settings::SettingRow;
use crate::view::TableRow;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest report that is read, in bytes. The largest one that haul writes is a hundredth of
/// it.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// The reports of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunReports {
    pub(super) side: Side,
    /// The link of each experiment.
    pub(super) labs: Vec<(String, LabFacts)>,
    /// Why an experiment supports no finding.
    pub(super) obstacles: Vec<(String, String)>,
    /// The experiments without a measured row, each with the reason.
    pub(super) unmeasured: Vec<(String, String)>,
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
    /// A report, or a folder of reports, lacks a measured row.
    #[error("{path} has no row that could be measured: {reasons}", path = path.display())]
    Unmeasured {
        /// The path.
        path: PathBuf,
        /// The reason of each experiment.
        reasons: String,
    },
    /// A folder holds no report.
    #[error("{path} has no report of haul bench", path = path.display())]
    Empty {
        /// The path.
        path: PathBuf,
    },
}

/// Reads a run from a folder that `haul bench` wrote.
pub fn load_folder(path: &Path) -> Result<RunReports, LoadError> {
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
    let reports: Vec<RunReports> =
        files.iter().filter_map(|file| read(file).transpose()).collect::<Result<_, _>>()?;
    let name = path.display().to_string();
    let run = merge(reports, &name).ok_or_else(|| LoadError::Empty { path: path.into() })?;
    require_rows(run, path)
}

/// Reads a run from the content of `path`: a JSON report, or a JSON list of reports.
pub fn load_report(path: &Path, content: &[u8]) -> Result<RunReports, LoadError> {
    let run = parse_file(path, content)?.ok_or_else(|| LoadError::Unmeasured {
        path: path.into(),
        reasons: "it has only experiments that cannot be compared".into(),
    })?;
    require_rows(run, path)
}

/// Checks that a run has a measured row.
fn require_rows(run: RunReports, path: &Path) -> Result<RunReports, LoadError> {
    if !run.rows.is_empty() {
        return Ok(run);
    }
    let reasons: Vec<String> = run
        .unmeasured
        .iter()
        .map(|(experiment, reason)| format!("{experiment}: {reason}"))
        .collect();
    Err(LoadError::Unmeasured { path: path.into(), reasons: reasons.join("; ") })
}

/// The reports of one run; `None` if there are none.
fn merge(reports: Vec<RunReports>, name: &str) -> Option<RunReports> {
    let mut run = reports.into_iter().reduce(|mut run, report| {
        // Times in RFC 3339 and UTC sort as text.
        run.side.started = run.side.started.min(report.side.started);
        run.side.lab = run.side.lab.take().or(report.side.lab);
        run.labs.extend(report.labs);
        run.obstacles.extend(report.obstacles);
        run.unmeasured.extend(report.unmeasured);
        run.rows.extend(report.rows);
        run
    })?;
    run.side.name = name.into();
    Some(run)
}

/// Reads a file: one report or a list of them. `None` if there is none whose rows can be compared.
fn read(path: &Path) -> Result<Option<RunReports>, LoadError> {
    let failed = |error| LoadError::File { path: path.into(), error };
    let mut content = Vec::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX).read_to_end(&mut content).map_err(failed)?;
    parse_file(path, &content)
}

fn parse_file(path: &Path, content: &[u8]) -> Result<Option<RunReports>, LoadError> {
    let malformed = |problem: String| LoadError::Malformed { path: path.into(), problem };
    let file: Value =
        serde_json::from_slice(content).map_err(|error| malformed(error.to_string()))?;
    let reports = if let Value::Array(reports) = file { reports } else { vec![file] };
    let name = path.display().to_string();
    let reports = reports.into_iter().filter_map(|report| read_report(report, &name).transpose());
    Ok(merge(reports.collect::<Result<_, _>>().map_err(malformed)?, &name))
}

/// Reads one report; `None` if it belongs to an experiment whose rows cannot be compared.
fn read_report(report: Value, name: &str) -> Result<Option<RunReports>, String> {
    let schema = report["schema"].as_str().ok_or("it names no schema")?;
    if schema != SCHEMA {
        return Err(format!("its schema is {schema:?}, and this version reads {SCHEMA:?}"));
    }
    let experiment = report["experiment"].as_str().ok_or("it names no experiment")?;
    let parse = match experiment {
        "send" => parse::<SendRow>,
        "receive" => parse::<ReceiveRow>,
        "forward" => parse::<ForwardRow>,
        "interrupts" => parse::<InterruptsRow>,
        "settings" => parse::<SettingRow>,
        "loan" => parse::<LoanRow>,
        "copies" => parse::<CopiesRow>,
        "checksum" => parse::<ChecksumRow>,
        _ => return Ok(None),
    };
    parse(report, name).map(Some)
}

fn parse<R: TableRow + DeserializeOwned>(report: Value, name: &str) -> Result<RunReports, String> {
    let report: Report<R> = serde_json::from_value(report).map_err(|error| error.to_string())?;
    let rows = MeasuredRow::all(&report);
    let unmeasured = rows.is_empty().then(|| {
        let is_old = |row: &R| row.refusal_reason().is_none() && row.round_count() > 0;
        let reason = if report.rows.iter().any(is_old) {
            "its rows have no costs of rounds: measure again with this version"
        } else {
            let refused = report.rows.iter().find_map(R::refusal_reason);
            refused.unwrap_or("no row was measured")
        };
        (report.experiment.clone(), reason.to_owned())
    });
    let of_experiment = |text: String| (report.experiment.clone(), text);
    let obstacle = report.noise.as_ref().and_then(Noise::obstacle).map(of_experiment);
    let lab = report.lab.clone().map(|lab| (report.experiment.clone(), lab));
    let side = Side {
        name: name.into(),
        started: report.started,
        haul: report.haul,
        commit: report.commit,
        command: report.command,
        host: report.host,
        lab: report.lab,
    };
    let (labs, obstacles) = (lab.into_iter().collect(), obstacle.into_iter().collect());
    Ok(RunReports { side, labs, obstacles, unmeasured: unmeasured.into_iter().collect(), rows })
}
