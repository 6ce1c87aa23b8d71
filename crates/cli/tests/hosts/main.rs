//! Several hosts: `haul push` to all of them, and `haul fleet` under launchers.

mod cluster;
#[path = "../common/command.rs"]
mod command;
mod fleet;
#[path = "../common/program.rs"]
mod program;
mod push;
#[path = "../common/running.rs"]
mod running;
mod slurm;
mod slurm_jobs;
