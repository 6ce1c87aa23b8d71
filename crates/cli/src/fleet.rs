//! `haul fleet`: commands that a launcher starts on all hosts of a job.

mod bench;
mod hosts;
mod joined;
mod push;

use crate::output::Failure;
use bench::FleetBenchArguments;
use clap::{Arg, Args, Subcommand};
use push::FleetPushArguments;
use std::process::ExitCode;

const PUSH_EXAMPLES: &str = "\
Examples:
  srun --mpi=pmi2 haul fleet push model.bin /scratch/
  mpiexec.hydra -ppn 1 haul fleet push -a dataset/ /data/dataset
  srun --mpi=pmi2 haul fleet push --delta disk.img /srv/images/

See docs/fleet.md for Open MPI, torchrun and Kubernetes.";

#[derive(Debug, Args)]
pub struct FleetArguments {
    #[command(subcommand)]
    command: FleetCommand,
    /// Let ranks meet that cannot recognize each other: no PMI, munge or HAUL_TOKEN
    #[arg(long, global = true)]
    insecure: bool,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    /// Measure every pair of hosts of the job, and name the host or the link that is slow
    ///
    /// Rank 0 prints a table: throughput from each host to each other host. The pairs are measured
    /// in rounds, so that no host is in two pairs at a time.
    Bench(FleetBenchArguments),
    /// Print the hosts of the job as they reach each other
    ///
    /// Rank 0 prints which launcher was found, and a line for each rank: its host and the addresses
    /// of the host.
    Hosts,
    /// Copy files and directories from the host of rank 0 to all hosts of the job
    ///
    /// Each host passes the content on to the next host, so rank 0 sends one copy. The host of rank
    /// 0 gets a copy too.
    #[command(
        after_help = PUSH_EXAMPLES,
        args_override_self = true,
        disable_help_flag = true,
        mut_args = hide_refused
    )]
    Push(Box<FleetPushArguments>),
}

/// Hides the options that `haul fleet push` refuses.
fn hide_refused(argument: Arg) -> Arg {
    let is_refused = push::REFUSED.contains(&argument.get_id().as_str());
    if is_refused { argument.hide(true) } else { argument }
}

/// Runs `haul fleet`.
pub fn run(arguments: &FleetArguments) -> Result<ExitCode, Failure> {
    match &arguments.command {
        FleetCommand::Bench(bench) => bench::run(bench, arguments.insecure),
        FleetCommand::Hosts => hosts::run(arguments.insecure),
        FleetCommand::Push(push) => push::run(push, arguments.insecure),
    }
}
