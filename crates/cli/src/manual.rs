//! Shell completions and manual pages, generated from the definition of the command line.

use crate::arguments::{CompletionsArguments, ManArguments, definition};
use crate::output::{Failure, check_directory, print};
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// Prints the completions of one shell.
pub fn print_completions(arguments: &CompletionsArguments) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut definition(), "haul", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes `haul.1`, `haul-bench.1`, `haul-bench-send.1` and so on.
pub fn write_pages(arguments: &ManArguments) -> Result<ExitCode, Failure> {
    // If that fails, the check has the reason.
    let _ = fs::create_dir(&arguments.dir);
    check_directory(&arguments.dir)?;
    let mut command = definition();
    // Builds the subcommands' full names.
    command.build();
    write_page(command, &arguments.dir)?;
    Ok(ExitCode::SUCCESS)
}

fn write_page(command: clap::Command, dir: &Path) -> Result<(), Failure> {
    for subcommand in command.get_subcommands() {
        if subcommand.get_name() != "help" {
            write_page(subcommand.clone(), dir)?;
        }
    }
    let name = command.get_display_name().unwrap_or("haul").to_owned();
    let path = dir.join(format!("{name}.1"));
    let failed = |error| Failure::failed(format!("cannot write {}: {error}", path.display()));
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).map_err(failed)?;
    haul_fs::write_output(&path, &page, 0o644).map_err(failed)
}
