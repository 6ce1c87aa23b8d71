//! `haul fleet`: commands that a launcher starts on all hosts of a job.

use crate::output::{self, Failure};
use clap::{Args, Subcommand};
use haul_fleet::{Announcement, Fleet};
use std::fmt::Write;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct FleetArguments {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    /// Print the hosts of the job as they reach each other
    ///
    /// Rank 0 prints which launcher was found, and a line for each rank: its host and the addresses
    /// of the host.
    Hosts,
}

/// Runs `haul fleet`.
pub fn run(arguments: &FleetArguments) -> Result<ExitCode, Failure> {
    let FleetCommand::Hosts = arguments.command;
    let fleet = Fleet::from_environment().map_err(Failure::bad_input)?;
    let ranks = haul_fleet::exchange(&fleet, &Announcement::of_this_host());
    let ranks = ranks.map_err(|error| Failure::failed(format!("rank {}: {error}", fleet.rank)))?;
    if fleet.rank == 0 {
        output::print(&hosts_text(&fleet, &ranks))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A line about the fleet, and a line for each rank.
fn hosts_text(fleet: &Fleet, ranks: &[Announcement]) -> String {
    let is_first = |&at: &usize| !ranks[..at].iter().any(|other| other.is_same_host(&ranks[at]));
    let hosts = (0..ranks.len()).filter(is_first).count();
    let Fleet { launcher, size, .. } = fleet;
    let mut text = format!("{size} ranks on {hosts} hosts, started by {launcher}\n");
    for (rank, Announcement { host_name, addresses, .. }) in ranks.iter().enumerate() {
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        // A name of another host may hold control characters.
        let host_name = host_name.escape_debug();
        let _ = writeln!(text, "rank {rank}  {host_name}  {}", addresses.join(" "));
    }
    text
}
