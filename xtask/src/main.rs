//! Developer commands: `cargo xtask peers send` puts the usual tools beside haul, `cargo xtask vm` boots a guest,
//! `cargo xtask chart` draws the README's picture.

#![forbid(unsafe_code)]

mod peers;
mod vm;

use clap::{Parser, Subcommand};
use haul_bench::{BenchError, Figure};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Commands for those who work on haul.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure other programs beside haul, in the same lab, under the same meter
    #[command(subcommand)]
    Peers(Peers),
    /// Boot a guest with a network card that gathers pages, and prove there what the lab cannot show
    Vm,
    /// Draw the chart of a report of `haul bench send`, as SVG on standard output
    Chart {
        /// The report
        report: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum Peers {
    /// iperf3 and iperf3 -Z beside read+send and sendfile
    Send {
        /// Measure each this often
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Everybody's congestion control
        #[arg(long, default_value = "cubic")]
        congestion: String,
    },
    /// nginx, lighttpd, Caddy and Apache beside haul serve
    Serve(peers::ServeArguments),
    /// The barest server, for `peers serve`
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
        Command::Peers(Peers::Bare(arguments)) => finish("peers bare", peers::bare(&arguments)),
        Command::Vm => finish("vm", vm::run().map_err(|error| error.to_string())),
        Command::Chart { report } => run_chart(&report),
    }
}

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
    let text = std::fs::read(report).map_err(|error| error.to_string());
    let parsed = text.and_then(|text| {
        serde_json::from_slice::<haul_bench::send::SendReport>(&text)
            .map_err(|error| error.to_string())
    });
    match parsed {
        Ok(report) => {
            print!("{}", haul_bench::export::svg::render(&report.view()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cargo xtask chart: {}: {error}", report.display());
            ExitCode::from(2)
        }
    }
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
    haul_lab::become_lab_user()?;
    let rows = haul_bench::peers::send(rounds, congestion, &mut |next| eprintln!("{next}"))?;
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
        "reported: by iperf3 itself, for haul by getrusage; {rounds} rounds, interleaved, medians"
    );
    Ok(())
}

fn number(figure: Option<Figure>, unit: f64) -> String {
    figure.map_or("?".into(), |figure| format!("{:.1}", figure.median / unit))
}
