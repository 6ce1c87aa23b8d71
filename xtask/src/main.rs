//! Developer commands.
//!
//! `cargo xtask peers` compares other programs with haul, `cargo xtask vm` boots a virtual machine
//! for tests, `cargo xtask chart` draws the charts of the documents, and `cargo xtask package`
//! makes the packages of a release.

#![forbid(unsafe_code)]

mod package;
mod peers;
mod static_build;
mod vm;

use clap::{Parser, Subcommand};
use haul_bench::forward::ForwardRow;
use haul_bench::receive::ReceiveRow;
use haul_bench::report::Report;
use haul_bench::send::SendRow;
use haul_bench::view::TableRow;
use haul_bench::{BenchError, Estimate};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Commands for the development of haul.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare other programs with haul in the same lab, measured by the same meter
    #[command(subcommand)]
    Peers(Peers),
    /// Boot a virtual machine whose network card supports scatter-gather, and test there what veth
    /// cannot show: sends that are really zero-copied
    Vm {
        /// Kernel of the guest: 6.1, 6.12, 7.3 (ci/install --kernels fetches them), or a folder
        /// with an unpacked package [default: the kernel of this Debian]
        #[arg(long, value_name = "VERSION|DIR")]
        kernel: Option<String>,
        /// Count what sending a MiB takes, in instructions and in bytes loaded and stored, and run
        /// no tests. The counts do not depend on what else the machine does
        #[arg(long, conflicts_with_all = ["all", "haul"])]
        counts: bool,
        /// Also run the tests that need no guest: several minutes more
        #[arg(long, conflicts_with = "haul")]
        all: bool,
        /// Run haul with these arguments there, and no tests: bench forward --traffic tls. The CPU
        /// is emulated: what a measurement costs there is no cost of a real one
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        haul: Vec<String>,
    },
    /// Switch the guest off while haul pushes files to its disk, and compare them; needs root
    PowerCuts {
        /// How often the guest is switched off
        #[arg(long, default_value_t = 10)]
        rounds: u32,
        /// Options of haul push, such as --durable no
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Connect standard input and output with the guest of power-cuts
    #[command(hide = true)]
    ConnectGuest {
        /// What haul passes to the command in place of ssh
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        ignored: Vec<String>,
    },
    /// Build a static binary, an archive of it, a Debian package and a container file
    Package {
        /// Directory to write them into
        #[arg(long, value_name = "DIR", default_value = "target/packages")]
        out: PathBuf,
    },
    /// Print the chart of a report of haul bench send, receive or forward as SVG on standard output
    Chart {
        /// JSON report
        report: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum Peers {
    /// Compare iperf3 with haul's read+send, and iperf3 -Z with haul's sendfile
    Send {
        /// Number of measurements of each program
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Congestion control of every sender
        #[arg(long, default_value = "cubic")]
        congestion: String,
    },
    /// Compare nginx, lighttpd, Caddy and Apache with haul serve
    Serve(peers::ServeArguments),
    /// Compare HAProxy, nginx and socat with haul proxy
    Proxy(peers::ProxyArguments),
    /// Compare rsync and tar through ssh, and rsync's daemon, with haul push
    Transfer(peers::TransferArguments),
    /// Run the minimal server that `peers serve` measures as a lower bound
    #[command(hide = true)]
    Bare(peers::BareArguments),
}

fn main() -> ExitCode {
    if let Some(code) = vm::run_if_first_process() {
        return code;
    }
    if let Some(code) = haul_bench::worker::run_if_asked() {
        return code;
    }
    match Arguments::parse().command {
        Command::Peers(Peers::Send { rounds, congestion }) => run_peers(rounds, &congestion),
        Command::Peers(Peers::Serve(arguments)) => finish("peers serve", peers::serve(&arguments)),
        Command::Peers(Peers::Proxy(arguments)) => finish("peers proxy", peers::proxy(&arguments)),
        Command::Peers(Peers::Transfer(arguments)) => {
            finish("peers transfer", peers::transfer(&arguments))
        }
        Command::Peers(Peers::Bare(arguments)) => finish("peers bare", peers::bare(&arguments)),
        Command::Vm { kernel, counts, all, haul } => {
            let options = vm::Options { kernel, all, counts, haul };
            finish("vm", vm::run(&options).map_err(|error| error.to_string()))
        }
        Command::PowerCuts { rounds, options } => {
            let cuts = vm::power_cuts(rounds, &options);
            finish("power-cuts", cuts.map_err(|error| error.to_string()))
        }
        Command::ConnectGuest { .. } => {
            finish("connect-guest", vm::connect().map_err(|error| error.to_string()))
        }
        Command::Package { out } => finish("package", package::run(&out)),
        Command::Chart { report } => run_chart(&report),
    }
}

/// Prints the error of a command, if any, and returns the exit code.
fn finish(command: &str, result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask {command}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_chart(report: &Path) -> ExitCode {
    let text = std::fs::read_to_string(report).map_err(|error| error.to_string());
    match text.and_then(|text| chart(&text)) {
        Ok(chart) => {
            print!("{chart}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cargo xtask chart: {}: {error}", report.display());
            ExitCode::from(2)
        }
    }
}

/// The chart of a report of one of the experiments that the documents show.
fn chart(text: &str) -> Result<String, String> {
    let report: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match report["experiment"].as_str() {
        Some("send") => draw::<SendRow>(report),
        Some("receive") => draw::<ReceiveRow>(report),
        Some("forward") => draw::<ForwardRow>(report),
        _ => Err("it is no report of send, receive or forward".into()),
    }
}

fn draw<R: TableRow + DeserializeOwned>(report: Value) -> Result<String, String> {
    let report: Report<R> = serde_json::from_value(report).map_err(|error| error.to_string())?;
    Ok(haul_bench::export::svg::render(&report.view()))
}

fn run_peers(rounds: usize, congestion: &str) -> ExitCode {
    match peers_send(rounds, congestion) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask peers send: {error}");
            ExitCode::from(if error.is_bad_input() { 2 } else { 1 })
        }
    }
}

fn peers_send(rounds: usize, congestion: &str) -> Result<(), BenchError> {
    haul_lab::enter_user_namespace()?;
    let rows = haul_bench::peers::send(rounds, congestion, &mut |message| eprintln!("{message}"))?;
    println!(
        "{:<26} {:>8} {:>14} {:>12} {:>16} {:>15}",
        "", "Gbit/s", "reported CPU %", "meter CPU %", "sender µs/MiB", "receiver µs/MiB"
    );
    for row in &rows {
        println!(
            "{:<26} {:>8} {:>14} {:>12} {:>16} {:>15}",
            row.name,
            number(row.throughput_bits_per_second, 1e9),
            number(row.reported_percent, 1.0),
            number(row.sender_load_percent, 1.0),
            number(row.sender_us_per_mib, 1.0),
            number(row.receiver_us_per_mib, 1.0),
        );
    }
    println!(
        "reported: by iperf3 itself, by getrusage for haul; medians of {rounds} interleaved rounds"
    );
    Ok(())
}

/// Formats the median of an estimate in multiples of `unit`, or `?` if there is no estimate.
fn number(estimate: Option<Estimate>, unit: f64) -> String {
    estimate.map_or("?".into(), |estimate| format!("{:.1}", estimate.median / unit))
}
