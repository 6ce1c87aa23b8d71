//! `haul fleet`: commands that a launcher starts on all hosts of a job.

mod bench;
mod hosts;
mod joined;
mod push;

use crate::output::Failure;
use bench::FleetBenchArguments;
use clap::{Args, Subcommand};
use push::FleetPushArguments;
use std::process::ExitCode;

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
    #[command(args_override_self = true, disable_help_flag = true)]
    Push(Box<FleetPushArguments>),
}

/// Runs `haul fleet`.
pub fn run(arguments: &FleetArguments) -> Result<ExitCode, Failure> {
    match &arguments.command {
        FleetCommand::Bench(bench) => bench::run(bench, arguments.insecure),
        FleetCommand::Hosts => hosts::run(arguments.insecure),
        FleetCommand::Push(push) => push::run(push, arguments.insecure),
    }
}
