//! Reads the reports of a run: a folder of JSON files, or a single JSON file.

use super::run_reports::{RunReports, merge};
use super::{MeasuredRow, Side, iperf3, soak};
use crate::checksum::ChecksumRow;
use crate::copies::CopiesRow;
use crate::forward::ForwardRow;
use crate::interrupts::InterruptsRow;
use crate::loan::LoanRow;
use crate::receive::ReceiveRow;
use crate::report::{Report, SCHEMA};
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
    #[error("{path} cannot be compared: {problem}", path = path.display())]
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
    #[error(
        "{path} does not contain a report of haul or iperf3 (*.json)",
        path = path.display()
    )]
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
        // The summary does not have rows.
        let is_report = file.extension().is_some_and(|extension| extension == "json")
            && file.file_name().is_some_and(|name| name != "summary.json");
        // A pipe in the folder would block.
        let is_regular = || fs::metadata(&file).is_ok_and(|metadata| metadata.is_file());
        files.extend((is_report && is_regular()).then_some(file));
    }
    files.sort();
    let reports: Vec<RunReports> =
        files.iter().filter_map(|file| read(file).transpose()).collect::<Result<_, _>>()?;
    let name = path.display().to_string();
    let run = merge(reports, &name).ok_or_else(|| LoadError::Empty { path: path.into() })?;
    require_rows(run, path)
}

/// Reads a run from the content of `path`: a JSON report, a JSON list of reports, or one report
/// after the other, as a loop in a shell writes them.
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
    if content.len() as u64 >= FILE_BYTES_MAX {
        return Err(malformed(format!("it is larger than {} MiB", FILE_BYTES_MAX >> 20)));
    }
    let mut reports = Vec::new();
    for file in serde_json::Deserializer::from_slice(content).into_iter::<Value>() {
        match file.map_err(|error| malformed(error.to_string()))? {
            Value::Array(list) => reports.extend(list),
            report => reports.push(report),
        }
    }
    if reports.is_empty() {
        return Err(malformed("it has no report".into()));
    }
    reports.iter_mut().for_each(remove_control_characters);
    let name = path.display().to_string();
    let reports = reports.into_iter().filter_map(|report| read_report(report, &name).transpose());
    Ok(merge(reports.collect::<Result<_, _>>().map_err(malformed)?, &name))
}

/// Removes what a terminal would obey, because the report may come from another host.
fn remove_control_characters(value: &mut Value) {
    match value {
        Value::String(text) => text.retain(|letter| !letter.is_control()),
        Value::Array(values) => values.iter_mut().for_each(remove_control_characters),
        Value::Object(fields) => fields.values_mut().for_each(remove_control_characters),
        _ => {}
    }
}

/// Reads one report; `None` if it belongs to an experiment whose rows cannot be compared.
fn read_report(report: Value, name: &str) -> Result<Option<RunReports>, String> {
    if iperf3::is_report(&report) {
        return iperf3::read(report, name).map(Some);
    }
    if iperf3::is_stream(&report) {
        return Err("iperf3 wrote it with --json-stream: use --json".into());
    }
    let schema = report["schema"].as_str().ok_or("it names no schema")?.to_owned();
    if soak::is_schema(&schema) {
        return soak::read(report, &schema, name).map(Some);
    }
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
    let unmeasured = unmeasured.into_iter().collect();
    let (conditions, warnings) = (Vec::new(), Vec::new());
    Ok(RunReports { side, labs, conditions, obstacles, unmeasured, warnings, rows })
}
