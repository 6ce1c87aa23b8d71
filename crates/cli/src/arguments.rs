//! The command line.

use crate::output::{Destination, Failure};
use crate::serve::ServeArguments;
use clap::{Args, Parser, Subcommand, ValueEnum};
use haul_bench::forward::Traffic;
use haul_bench::forward::method::TestedForwardMethod;
use haul_bench::quantity::{Rate, Size};
use haul_bench::receive::method::ReceiveMethod;
use haul_bench::receive::{PageOrder, SentBy};
use haul_bench::regime::Reading;
use haul_bench::settings;
use haul_bench::tested_method::TestedMethod;
use haul_bench::workload::Workload;
use haul_lab::{Loss, Offloads};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The cheapest way to move bytes over TCP on Linux, and the proof of it.
#[derive(Debug, Parser)]
#[command(name = "haul", version, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure what every way of sending, receiving and forwarding costs on this machine, and where that goes
    ///
    /// Without an experiment: all of them in a quick form, written to ./haul-report/ as JSON, Markdown and one
    /// web page.
    Bench(Box<BenchArguments>),
    /// Find the cheapest path for each job, put it to the test and write it down; programs load it
    Plan(PlanArguments),
    /// Measure the true CPU load of this machine, interrupts included, for a while or while a command runs
    Soak(SoakArguments),
    /// Say what this kernel, network device and limit set allow, and how to mend what they do not
    Doctor(DoctorArguments),
    /// Serve the files of a folder over HTTP
    Serve(Box<ServeArguments>),
    /// Run a program in the lab: two hosts on this machine, joined by a veth pair, each with its own CPU
    Lab(LabArguments),
}

#[derive(Debug, Args)]
pub struct BenchArguments {
    /// What to measure; without one, everything in a quick form
    #[command(subcommand)]
    pub experiment: Option<Experiment>,
    /// Wait for another machine that measures with this one by --to [default: port 4285 of every address]
    ///
    /// Bytes come to the port after it. Any host that reaches it can make this machine receive, and forward back to that host: let
    /// it listen only as long as you measure.
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = EVERYWHERE, exclusive = true)]
    pub listen: Option<Listen>,
    #[command(flatten)]
    pub common: CommonArguments,
}

/// What every experiment takes.
#[derive(Debug, Args)]
pub struct CommonArguments {
    /// Measure each row this often; a verdict takes 9 [default: 21, with --quick 15]
    #[arg(long, value_name = "N", global = true)]
    pub rounds: Option<usize>,
    /// Fewer rows, fewer and shorter rounds; plain `haul bench` is quick unless it is --full
    #[arg(long, global = true, conflicts_with = "full")]
    pub quick: bool,
    /// Every row and all rounds, which an experiment by its name does anyway; all of them take several times as long as in their quick form
    #[arg(long, global = true)]
    pub full: bool,
    /// The sockets' congestion control [default: cubic, or reno where cubic may not be set; for settings the host's own]
    #[arg(long, value_name = "NAME", global = true)]
    pub congestion: Option<String>,
    /// Send, receive and forward between this machine and one on which `haul bench --listen` runs, instead of in the lab
    #[arg(long, value_name = "HOST[:PORT]", global = true)]
    pub to: Option<String>,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub json: Option<Destination>,
    /// Write the report as Markdown; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub markdown: Option<Destination>,
    /// Write the report as a web page; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub html: Option<Destination>,
}

#[derive(Debug, Subcommand)]
pub enum Experiment {
    /// What each way of sending files or memory costs
    Send(SendArguments),
    /// What each way of receiving costs, and when pages can be mapped
    Receive(ReceiveArguments),
    /// What each way of passing on a stream costs, and how long small messages take through it
    Forward(ForwardArguments),
    /// Where in the kernel the time goes, and so the most that any change there could save
    Profile(ProfileArguments),
    /// Packets for each interrupt, and what grouping them saves either side
    Interrupts,
    /// What the hosts' settings are worth beside the choice of path, and the commands that set them
    Settings(SettingsArguments),
    /// From which size on lending memory to the kernel pays, and what it gains over sendfile
    Loan(LoanArguments),
    /// What looking at bytes costs beside copying them, from the first-level cache to memory
    Checksum(ChecksumArguments),
}

#[derive(Debug, Args)]
pub struct SendArguments {
    /// Paths to measure, separated by commas [default: all]
    ///
    /// read+write, read+send, mmap+send, sendfile, splice, vmsplice, zerocopy, uring-send, uring-zerocopy,
    /// uring-chain, floor, auto
    #[arg(long, value_delimiter = ',', value_name = "PATH,…", hide_possible_values = true)]
    pub paths: Vec<TestedMethod>,
    /// The most that one call sends [default: 64KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub chunk: Vec<Size>,
    /// What to send: COUNTxSIZE files of mixed sizes, COUNT=SIZE files of one size, file:PATH, or memory:SIZE [default: 63x350KB]
    #[arg(long, value_delimiter = ',', value_name = "WORKLOAD,…")]
    pub workload: Vec<Workload>,
    /// Hold partial packets back inside each file with `TCP_CORK` [default: off]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "off,on",
        value_enum,
        hide_possible_values = true
    )]
    pub cork: Vec<Switch>,
    /// Scatter-gather and checksum offload of the sending device [default: on]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "on,off",
        value_enum,
        hide_possible_values = true
    )]
    pub offloads: Vec<Switch>,
    /// Hold this rate, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
    /// How the receiver reads: held, at half of each path's full speed, so that its window holds the sender back; or free, as
    /// fast as it can [default: held]
    #[arg(long, value_name = "held|free", conflicts_with = "rate")]
    pub reading: Option<Reading>,
    /// The link's MTU in bytes [default: 9000]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// A plan of `haul plan`: beside each row of the library's choice (auto) one that chooses by it (planned)
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ReceiveArguments {
    /// Ways to measure, separated by commas [default: all]
    ///
    /// read, mapped, splice-to-file, uring-read, discard, auto
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub paths: Vec<ReceiveMethod>,
    /// The link's MTU in bytes; at 4148 a segment carries one page [default: 4148]
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…")]
    pub mtu: Vec<u32>,
    /// How it is sent, which decides what can be mapped: send, zerocopy, sendfile [default: send]
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub sent_by: Vec<SentBy>,
    /// How the network stack takes pages: default, or single
    ///
    /// single sets net.core.high_order_alloc_disable for the whole machine while the row runs, which only root
    /// may; it is put back afterwards, even after kill -9.
    #[arg(long, value_delimiter = ',', value_name = "ORDER,…")]
    pub page_order: Vec<PageOrder>,
    /// The memory that is filled round and round [default: 128KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub buffer: Vec<Size>,
    /// Whether the program looks at every byte [default: off]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "off,on",
        value_enum,
        hide_possible_values = true
    )]
    pub touch: Vec<Switch>,
}

#[derive(Debug, Args)]
pub struct ForwardArguments {
    /// Ways to measure, separated by commas [default: all]
    ///
    /// copy, splice, sockmap, auto
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub paths: Vec<TestedForwardMethod>,
    /// Sizes of the pipe or the buffer [default: 16KiB,64KiB,256KiB,1MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub buffer: Vec<Size>,
    /// What passes through: bulk, or messages:SIZE [default: bulk,messages:64B,messages:4KiB,messages:64KiB]
    #[arg(long, value_delimiter = ',', value_name = "TRAFFIC,…")]
    pub traffic: Vec<Traffic>,
    /// Hold this rate in bulk transfers, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
    /// The link's MTU in bytes [default: 9000]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
}

#[derive(Debug, Args)]
pub struct ProfileArguments {
    /// How it is sent
    #[arg(long, value_name = "PATH", default_value = "sendfile", hide_possible_values = true)]
    pub send: TestedMethod,
    /// How it is received
    #[arg(long, value_name = "PATH", default_value = "read")]
    pub receive: ReceiveMethod,
    /// What to send: COUNTxSIZE files of mixed sizes, COUNT=SIZE files of one size, file:PATH, or memory:SIZE
    #[arg(long, value_name = "WORKLOAD", default_value = "63x350KB")]
    pub workload: Workload,
    /// For how long [default: 10s, with --quick 2s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub duration: Option<Duration>,
    /// The link's MTU in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    pub mtu: u32,
    /// A command to watch the whole machine during, instead of sending and receiving
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct SettingsArguments {
    /// How it is sent [default: read+write,sendfile, with --quick sendfile]
    #[arg(long, value_delimiter = ',', value_name = "PATH,…", hide_possible_values = true)]
    pub paths: Vec<TestedMethod>,
    /// Settings to change, separated by commas [default: all]
    ///
    /// congestion, mtu, big-tcp, send-buffer, receive-buffer, notsent-lowat, socket-buffers, rcvlowat, read-pause, offloads, gro, busy-poll
    #[arg(long, value_delimiter = ',', value_name = "SETTING,…")]
    pub settings: Vec<settings::Name>,
    /// What to send: COUNTxSIZE files of mixed sizes, COUNT=SIZE files of one size, file:PATH, or memory:SIZE [default: 63x350KB]
    #[arg(long, value_name = "WORKLOAD")]
    pub workload: Option<Workload>,
    /// Hold this rate, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
}

#[derive(Debug, Args)]
pub struct LoanArguments {
    /// Sizes of a loan; datagrams take at most seven of 8972 bytes [default: 1KiB,4KiB,16KiB,64KiB,256KiB,1MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub piece: Vec<Size>,
}

#[derive(Debug, Args)]
pub struct ChecksumArguments {
    /// How many bytes at a time [default: 64B,1KiB,16KiB,256KiB,4MiB,128MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub size: Vec<Size>,
}

/// What stands for every address of this machine.
const EVERYWHERE: &str = "everywhere";

/// Where to wait for other machines.
#[derive(Debug, Clone, Copy)]
pub enum Listen {
    Everywhere,
    At(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == EVERYWHERE => Ok(Self::Everywhere),
            Ok(address) => Ok(Self::At(address)),
            Err(_) => Err(format!(
                "{text:?} is not an address and a port, such as 10.0.0.2:4285 or [::]:4285"
            )),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

impl From<Switch> for Offloads {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::On,
            Switch::Off => Self::Off,
        }
    }
}

#[derive(Debug, Args)]
pub struct SoakArguments {
    /// How long to measure, when no command is given
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub duration: Duration,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// Make known loads and print expected against read, then interrupt loads and who sees them
    #[arg(long, conflicts_with = "command")]
    pub self_check: bool,
    /// The command to measure
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct PlanArguments {
    /// Make the plan from this report of `haul bench send` instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    pub from: Option<PathBuf>,
    /// The plan's file; - is standard output [default: haul-plan.json]
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// Predict how many cores this rate takes by each path, such as 100gbit; by the plan's file if there is one
    #[arg(long, value_name = "RATE")]
    pub rate: Option<Rate>,
    /// Say whether kernel, CPU or network cards have changed since the plan's file was made; exit code 1 if so
    #[arg(long, conflicts_with = "rate")]
    pub check: bool,
    /// Measure each row this often, at least 9 times [default: 9]
    #[arg(long, value_name = "N", conflicts_with_all = ["from", "check", "rate"])]
    pub rounds: Option<usize>,
    /// Write the plan also where it has missed more than a third of its tests by over 15 %
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// The host that bytes would go to: a name or an address
    #[arg(long, value_name = "HOST")]
    pub peer: Option<String>,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
}

#[derive(Debug, Args)]
pub struct LabArguments {
    /// The link's MTU in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    pub mtu: u32,
    /// Hold the link at this rate, such as 1gbit
    #[arg(long)]
    pub rate: Option<Rate>,
    /// What sockets on both hosts begin with [default: the machine's own]
    #[arg(long, value_name = "NAME")]
    pub congestion: Option<String>,
    /// Drop this share of the packets, such as 0.1%
    #[arg(long, value_name = "PERCENT")]
    pub loss: Option<Loss>,
    /// A shell command to run on the receiving host meanwhile; it is killed when COMMAND ends
    #[arg(long, value_name = "SHELL COMMAND")]
    pub receiver: Option<String>,
    /// The command to run on the sending host; it finds its peer's address in `HAUL_PEER`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Every experiment as if it had been named without a flag.
pub fn every_experiment() -> Result<Vec<Experiment>, Failure> {
    let words = |name: &str| Arguments::try_parse_from(["haul", "bench", name]);
    let names =
        ["send", "receive", "forward", "profile", "interrupts", "settings", "loan", "checksum"];
    let parsed = names.map(|name| match words(name).map(|arguments| arguments.command) {
        Ok(Command::Bench(arguments)) => arguments.experiment.ok_or(name),
        _ => Err(name),
    });
    let alone = |name| Failure::failed(format!("experiment {name} does not stand by itself"));
    parsed.into_iter().map(|experiment| experiment.map_err(alone)).collect()
}

/// Reads the command line. Bad input becomes one line; `--help` and `--version` print and end the process.
pub fn parse() -> Result<Arguments, Failure> {
    Arguments::try_parse().map_err(|error| {
        if !error.use_stderr()
            || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        {
            error.exit();
        }
        let text = error.render().to_string();
        let lines = text
            .lines()
            .map(str::trim)
            .take_while(|line| {
                !line.starts_with("Usage:") && !line.starts_with("For more information")
            })
            .filter(|line| !line.is_empty());
        let line = lines.collect::<Vec<_>>().join("; ").replace(":; ", ": ");
        Failure::bad_input(line.strip_prefix("error: ").unwrap_or(&line))
    })
}

fn duration(text: &str) -> Result<Duration, String> {
    const MAX: Duration = Duration::from_secs(24 * 3600);
    let wrong = || format!("{text:?} is not a time from 100ms to 24h: write 10s, 500ms or 2m");
    let duration: jiff::SignedDuration = text.parse().map_err(|_| wrong())?;
    let duration = Duration::try_from(duration).map_err(|_| wrong())?;
    (Duration::from_millis(100)..=MAX).contains(&duration).then_some(duration).ok_or_else(wrong)
}
