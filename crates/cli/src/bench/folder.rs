//! The folders of runs: one for each run of all experiments, and a link to the latest.
//!
//! A run never writes into the folder of another one, so its files always belong together.

use super::ExperimentResult;
use crate::output::{Destination, Failure, check_directory};
use haul_bench::export;
use haul_bench::summary::Summary;
use haul_bench::view::View;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The default directory for the folders of runs.
const DIRECTORY: &str = "haul-report";
/// The link to the latest run.
const LATEST: &str = "latest";

/// The directory that holds the folders of runs.
pub struct RunDirectory {
    path: PathBuf,
    /// Whether the name of the link is free or belongs to a link. A copy of the directory, or an
    /// archive without links, may have a folder of this name.
    has_link: bool,
}

impl RunDirectory {
    /// Creates the directory if it does not exist, and checks that it can be written, before a long
    /// run.
    pub fn prepare(given: Option<&Path>) -> Result<Self, Failure> {
        let directory = given.unwrap_or(Path::new(DIRECTORY));
        fs::create_dir_all(directory).map_err(|error| {
            Failure::bad_input(format!(
                "cannot create the directory {}: {error} (run it in another directory, or name one \
                 with --out)",
                directory.display()
            ))
        })?;
        check_directory(directory)?;
        let latest = directory.join(LATEST);
        let has_link = fs::symlink_metadata(&latest).map_or(true, |found| found.is_symlink());
        if !has_link {
            eprintln!(
                "haul: {} is not a link, so it will not lead to this run: move it away",
                latest.display()
            );
        }
        Ok(Self { path: directory.into(), has_link })
    }

    /// Writes the reports of a run into a separate folder. Returns the path of the page.
    pub fn write(
        &self,
        summary: &Summary,
        results: &[ExperimentResult],
    ) -> Result<PathBuf, Failure> {
        let name = folder_name(&summary.started, &summary.host.name);
        let folder = self.create(&name)?;
        let file = |name: &str| Destination::File(folder.join(name));
        for result in results {
            file(&format!("{}.json", result.experiment)).write(&result.json)?;
        }
        let views: Vec<View> = results.iter().map(|result| result.view.clone()).collect();
        file("summary.json").write(&export::json(summary))?;
        let markdown = export::summary::markdown(summary) + &export::markdown::render(&views);
        file("report.md").write(&markdown)?;
        file("index.html").write(&export::html::render_run(summary, &views))?;
        // The report is complete without the link.
        if self.has_link
            && let Err(error) = self.link_latest(&folder)
        {
            eprintln!("haul: cannot set the link {}: {error}", self.latest().display());
        }
        Ok(folder.join("index.html"))
    }

    /// Creates the folder of a run. A second run in the same second gets a number.
    fn create(&self, name: &str) -> Result<PathBuf, Failure> {
        let candidates = std::iter::once(name.to_owned())
            .chain((2..1000).map(|number| format!("{name}-{number}")));
        for candidate in candidates {
            let folder = self.path.join(candidate);
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(folder),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let text = format!("cannot create {}: {error}", folder.display());
                    return Err(Failure::failed(text));
                }
            }
        }
        Err(Failure::failed(format!("{} has too many runs of {name}", self.path.display())))
    }

    fn latest(&self) -> PathBuf {
        self.path.join(LATEST)
    }

    /// Points the link at a folder. The link is replaced atomically.
    fn link_latest(&self, folder: &Path) -> io::Result<()> {
        let Some(name) = folder.file_name() else { return Ok(()) };
        let temporary = self.path.join(format!(".{LATEST}-{}", std::process::id()));
        std::os::unix::fs::symlink(name, &temporary)?;
        fs::rename(&temporary, self.latest()).inspect_err(|_| {
            // If this also fails, the link stays under its temporary name.
            let _ = fs::remove_file(&temporary);
        })
    }
}

/// The name of a run's folder: its start and its host, such as `2026-11-22T121033-web1`.
fn folder_name(started: &str, host: &str) -> String {
    let time: String = started.chars().filter(|character| *character != ':').collect();
    let time = time.trim_end_matches('Z');
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let host: String =
        host.chars().map(|character| if is_plain(character) { character } else { '_' }).collect();
    if host.is_empty() { time.to_owned() } else { format!("{time}-{host}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_named_by_time_and_host() {
        assert_eq!(folder_name("2026-11-22T12:10:33Z", "web1"), "2026-11-22T121033-web1");
        assert_eq!(folder_name("2026-11-22T12:10:33Z", "a/../b c"), "2026-11-22T121033-a_.._b_c");
        assert_eq!(folder_name("2026-11-22T12:10:33Z", ""), "2026-11-22T121033");
    }

    #[test]
    fn every_run_has_its_own_folder_and_the_link_is_the_latest() {
        let directory = tempfile::tempdir().unwrap();
        let runs = RunDirectory::prepare(Some(&directory.path().join("runs"))).unwrap();
        let mut summary = Summary::start();
        let first = runs.write(&summary, &[]).unwrap();
        let second = runs.write(&summary, &[]).unwrap();
        assert_ne!(first, second);
        let latest = || fs::canonicalize(runs.latest().join("index.html")).unwrap();
        assert_eq!(latest(), fs::canonicalize(&second).unwrap());
        summary.started = "2031-01-01T00:00:00Z".into();
        let third = runs.write(&summary, &[]).unwrap();
        assert_eq!(latest(), fs::canonicalize(third).unwrap());
        assert!(first.with_file_name("summary.json").exists());
        // As `cp -rL` leaves it.
        fs::remove_file(runs.latest()).unwrap();
        fs::create_dir(runs.latest()).unwrap();
        let runs = RunDirectory::prepare(Some(&directory.path().join("runs"))).unwrap();
        assert!(runs.write(&summary, &[]).unwrap().exists());
        assert!(runs.latest().is_dir() && !runs.latest().is_symlink());
    }
}
