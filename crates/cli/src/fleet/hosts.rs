//! `haul fleet hosts`: prints the hosts of the job.

use super::joined::{in_rank, notice_of};
use crate::output::{self, Failure};
use haul_fleet::{Announcement, Fleet};
use std::fmt::Write;
use std::process::ExitCode;

/// Runs `haul fleet hosts`.
pub fn run(is_insecure: bool) -> Result<ExitCode, Failure> {
    let fleet = Fleet::from_environment().map_err(Failure::bad_input)?;
    let own = Announcement::new(0, Vec::new());
    let ranks = haul_fleet::exchange(&fleet, &own, is_insecure, &notice_of(fleet.rank));
    let ranks = ranks.map_err(|error| in_rank(fleet.rank, error))?;
    if fleet.rank == 0 {
        output::print(&hosts_text(&fleet, &ranks))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A line about the fleet, and a line for each rank.
fn hosts_text(fleet: &Fleet, ranks: &[Announcement]) -> String {
    let hosts = haul_fleet::first_ranks(ranks).len();
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
