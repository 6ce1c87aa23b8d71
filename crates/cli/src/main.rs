//! The `haul` command: parses the arguments, calls the libraries and prints the results.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod compare;
mod daemon;
mod doctor;
mod exclusive;
mod fleet;
mod lab;
mod limits;
mod manual;
mod output;
mod plan;
mod proxy;
mod run;
mod schema;
mod serve;
mod soak;
mod transfer;
mod user_command;

use arguments::{Arguments, Command};
use output::Failure;
use rustix::process::DumpableBehavior;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Measurements start this program again as a worker process or as the meter.
    let is_internal = haul_bench::worker::run_if_asked()
        .or_else(haul_soak::process::run_if_asked)
        .or_else(haul_run::broker::run_if_asked);
    if let Some(code) = is_internal {
        return code;
    }
    let result = match arguments::parse() {
        Ok(Arguments { command }) => execute(command),
        Err(failure) => Err(failure),
    };
    result.unwrap_or_else(|failure| failure.report())
}

fn execute(command: Command) -> Result<ExitCode, Failure> {
    if !matches!(command, Command::Serve(_) | Command::Proxy(_)) {
        // A program with file capabilities, or that its user may not read, is not dumpable: the
        // files of /proc/self then belong to root. A measurement writes the maps of its user
        // namespace there, and its workers open its files there. A service keeps its secrets from
        // core dumps.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
    match command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Lab(arguments) => lab::run(&arguments),
        Command::Serve(arguments) => serve::run(*arguments),
        Command::Proxy(arguments) => proxy::run(*arguments),
        Command::Push(arguments) => transfer::push(&arguments),
        Command::Pull(arguments) => transfer::pull(&arguments),
        Command::Receive(arguments) => transfer::receive(&arguments),
        Command::Fleet(arguments) => fleet::run(&arguments),
        Command::Schema(arguments) => schema::run(&arguments),
        Command::Completions(arguments) => manual::print_completions(&arguments),
        Command::Man(arguments) => manual::write_pages(&arguments),
    }
}
