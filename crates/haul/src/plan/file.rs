//! Plan files: reading, checking and writing.

use super::{Plan, SCHEMA, Spread};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest plan file that is read, in bytes. The largest sensible one is a hundredth of it.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a plan could not be read or written.
#[derive(Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// The file cannot be read or written.
    File {
        /// The path of the file.
        path: PathBuf,
        /// The underlying error.
        error: io::Error,
    },
    /// The file is not a valid plan.
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// The fault in it.
        problem: String,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, error } => write!(formatter, "plan {}: {error}", path.display()),
            Self::Malformed { path, problem } => write!(
                formatter,
                "{} is not a valid plan: {problem}; make it again with `haul plan`",
                path.display()
            ),
        }
    }
}

impl std::error::Error for PlanError {}

impl From<PlanError> for io::Error {
    fn from(error: PlanError) -> Self {
        let kind = match &error {
            PlanError::File { error, .. } => error.kind(),
            PlanError::Malformed { .. } => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

impl Plan {
    /// Reads a plan file.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, PlanError> {
        let path = path.as_ref();
        let failed = |error| PlanError::File { path: path.into(), error };
        let malformed = |problem| PlanError::Malformed { path: path.into(), problem };
        let mut bytes = Vec::new();
        let mut file = File::open(path).map_err(failed)?.take(FILE_BYTES_MAX + 1);
        file.read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(malformed(format!("it has more than {FILE_BYTES_MAX} bytes")));
        }
        Self::parse(&bytes).map_err(malformed)
    }

    /// Parses a plan; the error describes its fault.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let plan: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if plan.schema != SCHEMA {
            return Err(format!(
                "its schema is {:?}, and this version reads {SCHEMA:?}",
                plan.schema
            ));
        }
        if plan.costs.is_empty() {
            return Err("it has no costs".into());
        }
        for cost in &plan.costs {
            if cost.points.windows(2).any(|pair| pair[0].bytes >= pair[1].bytes)
                || cost.points.first().is_some_and(|point| point.bytes == 0)
            {
                return Err(format!(
                    "{}: its points are not in the order of their sizes",
                    cost.path
                ));
            }
            let of_points = cost.points.iter().map(|point| point.us);
            for spread in [cost.us_per_call, cost.us_per_mib].into_iter().chain(of_points) {
                if !spread.is_valid() {
                    let Spread { median, low, high } = spread;
                    return Err(format!("{}: {median} ({low} to {high}) is no cost", cost.path));
                }
            }
        }
        Ok(plan)
    }

    /// Writes the plan. A regular file is replaced atomically, so that readers see the old plan or
    /// the new one. A pipe or a device is written to.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), PlanError> {
        let path = path.as_ref();
        let failed = |error| PlanError::File { path: path.into(), error };
        let mut text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        text.push('\n');
        haul_fs::write_output(path, text.as_bytes(), 0o666).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::SendMethod;
    use crate::plan::tests::{cost, plan};
    use crate::plan::{CANDIDATES, Cost, Point};
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn points_out_of_order_are_an_error() {
        let point = |bytes, us| Point { bytes, us: Spread { median: us, low: us, high: us } };
        let unordered = Cost {
            points: vec![point(5, 1.0), point(5, 2.0)],
            ..cost(SendMethod::Sendfile, 1.0, 1.0)
        };
        let text = serde_json::to_vec(&plan(vec![unordered])).unwrap();
        assert!(Plan::parse(&text).unwrap_err().contains("order of their sizes"));
    }

    #[test]
    fn the_builtin_plan_is_valid() {
        let text = serde_json::to_vec(Plan::builtin()).unwrap();
        assert_eq!(&Plan::parse(&text).unwrap(), Plan::builtin());
    }

    #[test]
    fn a_plan_is_saved_atomically_and_an_invalid_one_is_an_error_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        Plan::builtin().save(&path).unwrap();
        assert_eq!(&Plan::load(&path).unwrap(), Plan::builtin());
        let files = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 1, "a temporary file was left behind");
        let error_of = |text: &str| {
            fs::write(&path, text).unwrap();
            Plan::load(&path).unwrap_err().to_string()
        };
        assert!(error_of("").contains("haul plan"));
        assert!(error_of("{}").contains("missing field"));
        let text = serde_json::to_string(Plan::builtin()).unwrap();
        assert!(error_of(&text.replace("haul.plan/1", "haul.plan/9")).contains("haul.plan/9"));
        assert!(error_of(&text.replacen("sendfile", "sendfil", 1)).contains("unknown path"));
        assert!(error_of(&text.replacen("\"median\":", "\"median\":-", 1)).contains("no cost"));
        assert!(Plan::load("/dev/zero").unwrap_err().to_string().contains("more than"));
        let missing = Plan::load(folder.path().join("nothing")).unwrap_err();
        assert!(missing.to_string().contains("No such file"), "{missing}");
        assert!(matches!(Plan::builtin().save("/proc/no/plan"), Err(PlanError::File { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_safely(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Plan::parse(&bytes);
        }

        #[test]
        fn every_plan_round_trips_through_its_file(
            figures in proptest::collection::vec((0usize..6, 0.0f64..1e3, 0.0f64..1e4), 1..12)
        ) {
            let costs = figures
                .iter()
                .map(|&(index, call, mib)| cost(CANDIDATES[index], call, mib))
                .collect();
            let plan = plan(costs);
            prop_assert_eq!(Plan::parse(&serde_json::to_vec(&plan).unwrap()).unwrap(), plan);
        }
    }
}
