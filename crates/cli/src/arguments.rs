//! The command line. Doc comments on arguments are the `--help` text.

use crate::fleet::FleetArguments;
use crate::output::{self, Destination, Failure};
use crate::proxy::ProxyArguments;
use crate::run::RunArguments;
use crate::serve::ServeArguments;
use crate::transfer::{ReceiveArguments as TransferReceiveArguments, TransferArguments};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use haul_bench::forward::Traffic;
use haul_bench::forward::method::TestedForwardMethod;
use haul_bench::receive::method::ReceiveMethod;
use haul_bench::receive::{PageOrder, SentBy};
use haul_bench::regime::Reading;
use haul_bench::settings;
use haul_bench::tested_method::TestedMethod;
use haul_bench::workload::Workload;
use haul_lab::{Loss, Offloads};
use haul_units::{ParseQuantityError, Rate, Size};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

mod examples;

/// Moves bytes over TCP on Linux as cheaply as the kernel allows, with measurements that prove it.
#[derive(Debug, Parser)]
#[command(name = "haul", version = haul_version::FULL)]
#[command(propagate_version = true, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure what every method of sending, receiving and forwarding costs on this machine, and
    /// where the CPU time is spent
    ///
    /// Without an experiment, runs all of them in quick form within two minutes, prints a summary
    /// and writes the results to a separate folder under ./haul-report/ as JSON, Markdown and one
    /// HTML page. haul-report/latest is the last one.
    #[command(after_help = examples::BENCH)]
    Bench(Box<BenchArguments>),
    /// Measure the cost of each path, test the resulting plan and write it to a file; programs load
    /// it to choose the cheapest path for each job
    #[command(after_help = examples::PLAN)]
    Plan(PlanArguments),
    /// Compare two runs of haul bench row by row, or two builds of haul in one run
    ///
    /// A and B are folders of runs, JSON reports, or two builds of haul. Builds are measured in the
    /// same rounds, which shows much smaller differences than two runs do. Reports of haul soak
    /// --json and iperf3 --json are accepted, also several in one file or folder; each report is a
    /// round.
    #[command(after_help = examples::COMPARE)]
    Compare(Box<CompareArguments>),
    /// Measure the true CPU load of this machine, interrupts included, for a given time or while a
    /// command runs
    #[command(after_help = examples::SOAK)]
    Soak(SoakArguments),
    /// Run an unmodified program, send its mapped files by sendfile where that is safe and cheaper,
    /// and report what its bytes cost
    ///
    /// With --watch, the program is not changed: only the report is made.
    ///
    /// The report goes to standard error when the last process of the command ends, and at SIGUSR1.
    /// See docs/run.md for what is counted, and for the limits.
    #[command(after_help = examples::RUN)]
    Run(RunArguments),
    /// Report what this kernel, network device and resource limits allow, and how to fix what they
    /// do not allow
    #[command(after_help = examples::DOCTOR)]
    Doctor(DoctorArguments),
    /// Serve the files of a directory over HTTP
    #[command(after_help = examples::SERVE)]
    Serve(Box<ServeArguments>),
    /// Connect clients to one of several servers and forward the bytes (layer-4 proxy)
    #[command(after_help = examples::PROXY)]
    Proxy(Box<ProxyArguments>),
    /// Copy files and directories to another host, which needs an ssh server
    #[command(after_help = examples::PUSH, args_override_self = true, disable_help_flag = true)]
    Push(Box<TransferArguments>),
    /// Copy files and directories from another host, which needs an ssh server
    #[command(after_help = examples::PULL, args_override_self = true, disable_help_flag = true)]
    Pull(Box<TransferArguments>),
    /// Be the other end of haul push and haul pull, which start this command through ssh
    Receive(TransferReceiveArguments),
    /// Work with the hosts of a job that srun, mpiexec or another launcher started
    #[command(after_help = examples::FLEET)]
    Fleet(FleetArguments),
    /// Run a command in the lab: two hosts (network namespaces) on this machine, joined by a veth
    /// pair, each with its own CPU
    #[command(after_help = examples::LAB)]
    Lab(LabArguments),
    /// Print the JSON Schema of a report, or the names of all schemas
    #[command(after_help = examples::SCHEMA)]
    Schema(SchemaArguments),
    /// Print completions of this command for a shell
    #[command(after_help = examples::COMPLETIONS)]
    Completions(CompletionsArguments),
    /// Write the manual pages of this command and its subcommands into a directory
    #[command(after_help = examples::MAN)]
    Man(ManArguments),
}

#[derive(Debug, Args)]
pub struct SchemaArguments {
    /// Name of the schema, such as send, summary or soak
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Print all schemas as tables of fields, as in docs/json.md
    #[arg(long, conflicts_with = "name")]
    pub markdown: bool,
}

#[derive(Debug, Args)]
pub struct CompletionsArguments {
    /// Shell, such as bash, zsh or fish
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct ManArguments {
    /// Directory, which must exist, such as /usr/local/share/man/man1
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct BenchArguments {
    /// Experiment to run; without one, all experiments in quick form
    #[command(subcommand)]
    pub experiment: Option<Experiment>,
    /// Directory for the folders of runs without an experiment's name [default: haul-report]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Listen for another machine that runs haul bench --to, and measure together with it
    /// [default: port 4285 of every address]
    ///
    /// Data connections use the next port number. Any host that can reach the port can make this
    /// machine receive data, and forward data back to that host: listen only while measuring.
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        num_args = 0..=1,
        default_missing_value = ALL_ADDRESSES,
        exclusive = true,
    )]
    pub listen: Option<ListenAddress>,
    #[command(flatten)]
    pub common: CommonArguments,
}

/// Arguments that all experiments have in common.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "one for each flag")]
pub struct CommonArguments {
    /// Time for the measurement, such as 90s or 5m [default: 2m; with --quick 30s; all experiments
    /// 2m, with --full 15m]
    ///
    /// Every row is measured often enough for a verdict, then the rows of questions that are still
    /// open, until their intervals are narrow enough or the time is over.
    #[arg(long = "for", value_name = "TIME", global = true, value_parser = duration)]
    pub time: Option<Duration>,
    /// Precision that is sufficient: half the width of the interval that the rounds of a ratio give
    /// [default: 5%]
    #[arg(long, value_name = "PERCENT", global = true, value_parser = percent)]
    pub within: Option<f64>,
    /// Measure each row this often, instead of by time; a verdict needs 9
    #[arg(long, value_name = "N", global = true, conflicts_with_all = ["time", "within"])]
    pub rounds: Option<usize>,
    /// Print the tables of every experiment, not only the summary
    #[arg(long, global = true)]
    pub verbose: bool,
    /// Measure fewer rows in shorter windows; haul bench without an experiment does so unless
    /// --full is given
    #[arg(long, global = true, conflicts_with = "full")]
    pub quick: bool,
    /// Measure every row, as a named experiment does by default
    #[arg(long, global = true)]
    pub full: bool,
    /// Congestion control of the sockets [default: cubic, or reno where cubic may not be set; for
    /// settings the host's own]
    #[arg(long, value_name = "NAME", global = true)]
    pub congestion: Option<String>,
    /// Send, receive and forward between this machine and HOST, which runs haul bench --listen,
    /// instead of in the lab
    #[arg(long, value_name = "HOST[:PORT]", global = true)]
    pub to: Option<String>,
    /// Do not wait for another haul that measures on this machine; the figures of both are wrong
    #[arg(long, global = true)]
    pub force: bool,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub json: Option<Destination>,
    /// Write the report as Markdown; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub markdown: Option<Destination>,
    /// Write the report as an HTML page; - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub html: Option<Destination>,
    /// Write the costs of the rounds in the format of Go's benchmarks, for benchstat; - is standard
    /// output
    #[arg(long, value_name = "FILE", global = true)]
    pub benchfmt: Option<Destination>,
    /// Write the costs in Bencher Metric Format (JSON); - is standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub bmf: Option<Destination>,
}

#[derive(Debug, Subcommand)]
pub enum Experiment {
    /// Measure what each method of sending files or memory costs
    #[command(after_help = examples::SEND)]
    Send(SendArguments),
    /// Measure what each method of receiving costs, and when pages can be mapped
    #[command(after_help = examples::RECEIVE)]
    Receive(ReceiveArguments),
    /// Measure what each method of forwarding a stream costs, and the latency of small messages
    #[command(after_help = examples::FORWARD)]
    Forward(ForwardArguments),
    /// Profile where in the kernel CPU time is spent: an upper bound on what any change there can
    /// save
    #[command(after_help = examples::PROFILE)]
    Profile(ProfileArguments),
    /// Measure packets per interrupt, and what batching packets saves on both hosts
    #[command(after_help = examples::INTERRUPTS)]
    Interrupts,
    /// Measure what host settings save in addition to the choice of path, and print the commands
    /// that set them
    #[command(after_help = examples::SETTINGS)]
    Settings(SettingsArguments),
    /// Measure from which size lending memory to the kernel costs less than copying, and what it
    /// saves over sendfile
    #[command(after_help = examples::LOAN)]
    Loan(LoanArguments),
    /// Measure what two copies, one copy and no copy of a file cost, and how much of sendfile's
    /// gain a kernel that copies would keep
    #[command(after_help = examples::COPIES)]
    Copies(CopiesArguments),
    /// Measure what checksums cost compared with copies, from the first-level cache to memory
    #[command(after_help = examples::CHECKSUM)]
    Checksum(ChecksumArguments),
}

#[derive(Debug, Args)]
pub struct SendArguments {
    /// Paths (send methods) to measure, separated by commas [default: all]
    ///
    /// read+write, read+send, mmap+send, sendfile, splice, vmsplice, zerocopy, uring-send,
    /// uring-zerocopy, uring-chain, floor, auto; for comparison, with one copy: mapped+write, and
    /// sendfile-copied (of files on tmpfs and of memory)
    #[arg(long, value_delimiter = ',', value_name = "PATH,…", hide_possible_values = true)]
    pub paths: Vec<TestedMethod>,
    /// Maximum size of one send call [default: 64KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub chunk: Vec<Size>,
    /// Data to send: COUNTxSIZE (files of mixed sizes that average SIZE), COUNT=SIZE (files of one
    /// size), file:PATH, or memory:SIZE [default: 63x350KB]
    #[arg(long, value_delimiter = ',', value_name = "WORKLOAD,…", value_parser = workload())]
    pub workload: Vec<Workload>,
    /// Hold partial segments back within each file with TCP_CORK [default: off]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "off,on",
        value_enum,
        hide_possible_values = true
    )]
    pub cork: Vec<Switch>,
    /// Scatter-gather and transmit checksum offload of the sending device [default: on]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "on,off",
        value_enum,
        hide_possible_values = true
    )]
    pub offloads: Vec<Switch>,
    /// Pace the sender to this rate, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
    /// Rate at which the receiver reads: held (half of each path's full speed, so that the receive
    /// window limits the sender) or free (as fast as it can) [default: held]
    #[arg(long, value_name = "held|free", conflicts_with = "rate")]
    pub reading: Option<Reading>,
    /// MTU of the link in bytes [default: 9000]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// Plan file, as haul plan writes it: for each auto row, also measure a planned row, in which
    /// the library chooses the path by this plan
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct CopiesArguments {
    /// Sizes of the file, which is only in the page cache (tmpfs) [default: 64KiB,4MiB,256MiB; with
    /// --quick 256MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub file: Vec<Size>,
    /// Maximum size of one send call [default: 64KiB,1MiB; with --quick 64KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub chunk: Vec<Size>,
    /// Folios of the file: small (4 KiB), or huge (2 MiB, needs root) [default: small]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "small,huge",
        value_enum,
        hide_possible_values = true
    )]
    pub folios: Vec<FoliosArgument>,
    /// Bytes in flight: the size of both sockets' buffers, or auto [default: auto]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub in_flight: Vec<InFlight>,
    /// How to measure: spinner (two hosts, whole CPUs), or cycles (one thread over loopback, also
    /// while other programs run, without root) [default: spinner]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "spinner,cycles",
        value_enum,
        hide_possible_values = true
    )]
    pub meter: Vec<MeterArgument>,
    /// Rate at which the receiver reads: held (half of each path's full speed) or free (as fast as
    /// it can) [default: held]
    #[arg(long, value_name = "held|free")]
    pub reading: Option<Reading>,
    /// MTU of the link in bytes [default: 9000]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
}

/// The folios of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FoliosArgument {
    /// 4 KiB.
    Small,
    /// 2 MiB.
    Huge,
}

/// How the cost of a row is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MeterArgument {
    /// Two hosts, and the CPU time of all their work.
    Spinner,
    /// Lock step on one CPU.
    Cycles,
}

/// The size of the sockets' buffers; `None` for `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlight(pub Option<Size>);

impl FromStr for InFlight {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" { Ok(Self(None)) } else { text.parse().map(|size| Self(Some(size))) }
    }
}

#[derive(Debug, Args)]
pub struct ReceiveArguments {
    /// Paths (receive methods) to measure, separated by commas [default: all]
    ///
    /// read, mapped, splice-to-file, uring-read, discard, auto
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub paths: Vec<ReceiveMethod>,
    /// MTU of the link in bytes; at 4148 a segment carries exactly one page [default: 4148]
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…")]
    pub mtu: Vec<u32>,
    /// Send method, which determines the pages that can be mapped: send, zerocopy, sendfile
    /// [default: send]
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub sent_by: Vec<SentBy>,
    /// How the network stack allocates pages: default, or single (one page at a time)
    ///
    /// single sets net.core.high_order_alloc_disable for the whole machine while the row runs; this
    /// requires root. The setting is restored afterwards, even after kill -9.
    #[arg(long, value_delimiter = ',', value_name = "ORDER,…")]
    pub page_order: Vec<PageOrder>,
    /// Size of the buffer, which is filled again and again from its start [default: 128KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub buffer: Vec<Size>,
    /// Read every received byte in the program [default: off]
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
    /// Paths (forward methods) to measure, separated by commas [default: all]
    ///
    /// copy, splice, sockmap, auto; of TLS: tls-copy, ktls-copy, ktls-splice
    #[arg(long, value_delimiter = ',', value_name = "PATH,…")]
    pub paths: Vec<TestedForwardMethod>,
    /// Sizes of the pipe or the buffer, separated by commas [default: 16KiB,64KiB,256KiB,1MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub buffer: Vec<Size>,
    /// Traffic to forward: bulk (as much as possible, in one direction), tls (bulk that the
    /// forwarder decrypts), or messages:SIZE (one message at a time, there and back) [default:
    /// bulk,messages:64B,messages:4KiB,messages:64KiB]
    #[arg(long, value_delimiter = ',', value_name = "TRAFFIC,…")]
    pub traffic: Vec<Traffic>,
    /// Pace bulk transfers to this rate, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
    /// MTU of the link in bytes [default: 9000]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
}

#[derive(Debug, Args)]
pub struct ProfileArguments {
    /// Path (send method) of the sending host
    #[arg(long, value_name = "PATH", default_value = "sendfile", hide_possible_values = true)]
    pub send: TestedMethod,
    /// Path (receive method) of the receiving host
    #[arg(long, value_name = "PATH", default_value = "read")]
    pub receive: ReceiveMethod,
    /// Data to send: COUNTxSIZE (files of mixed sizes that average SIZE), COUNT=SIZE (files of one
    /// size), file:PATH, or memory:SIZE
    #[arg(long, value_name = "WORKLOAD", default_value = "63x350KB", value_parser = workload())]
    pub workload: Workload,
    /// MTU of the link in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    pub mtu: u32,
    /// Command to run; the whole machine is profiled until it ends, instead of the two hosts while
    /// one sends to the other
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct SettingsArguments {
    /// Paths (send methods) to measure, separated by commas
    /// [default: read+write,sendfile, with --quick sendfile]
    #[arg(long, value_delimiter = ',', value_name = "PATH,…", hide_possible_values = true)]
    pub paths: Vec<TestedMethod>,
    /// Settings to change, separated by commas [default: all]
    ///
    /// congestion, mtu, big-tcp, send-buffer, receive-buffer, notsent-lowat, socket-buffers,
    /// rcvlowat, read-pause, offloads, gro, busy-poll
    #[arg(long, value_delimiter = ',', value_name = "SETTING,…")]
    pub settings: Vec<settings::Name>,
    /// Data to send: COUNTxSIZE (files of mixed sizes that average SIZE), COUNT=SIZE (files of one
    /// size), file:PATH, or memory:SIZE [default: 63x350KB]
    #[arg(long, value_name = "WORKLOAD", value_parser = workload())]
    pub workload: Option<Workload>,
    /// Pace the sender to this rate, such as 4gbit, instead of sending at full speed
    #[arg(long)]
    pub rate: Option<Rate>,
}

#[derive(Debug, Args)]
pub struct LoanArguments {
    /// Sizes of a loan, separated by commas; one call sends at most seven datagrams of 8972 bytes
    /// [default: 1KiB,4KiB,16KiB,64KiB,256KiB,1MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub piece: Vec<Size>,
}

#[derive(Debug, Args)]
pub struct ChecksumArguments {
    /// Bytes that one call processes, separated by commas
    /// [default: 64B,1KiB,16KiB,256KiB,4MiB,128MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub size: Vec<Size>,
}

/// Value of `--listen` that stands for every address of this machine.
const ALL_ADDRESSES: &str = "everywhere";

/// The addresses on which `haul bench --listen` listens.
#[derive(Debug, Clone, Copy)]
pub enum ListenAddress {
    All,
    One(SocketAddr),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == ALL_ADDRESSES => Ok(Self::All),
            Ok(address) => Ok(Self::One(address)),
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
pub struct CompareArguments {
    /// First run or build: a folder such as haul-report/latest, a JSON report (of haul bench, haul
    /// soak or iperf3), or a haul program
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Second run or build
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Exit with 1 if a row of B certainly costs more, and by more than this; with 3 if a row
    /// likely does, or cannot be compared
    ///
    /// A row certainly costs more if the interval of all rows jointly excludes equality. That takes
    /// 9 rounds for up to 12 rows, and 11 rounds for 43.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub fail_above: Option<f64>,
    /// Time for measuring two builds [default: 2m]
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub time: Option<Duration>,
    /// Precision that is sufficient for two builds [default: 2%]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub within: Option<f64>,
    /// Paths (send methods) to measure with two builds, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PATH,…", hide_possible_values = true)]
    pub paths: Vec<TestedMethod>,
    /// Maximum size of one send call of two builds [default: 64KiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…")]
    pub chunk: Vec<Size>,
    /// Data that two builds send, as for haul bench send [default: 63x350KB]
    #[arg(long, value_delimiter = ',', value_name = "WORKLOAD,…", value_parser = workload())]
    pub workload: Vec<Workload>,
    /// Do not wait for another haul that measures on this machine; the figures of both are wrong
    #[arg(long)]
    pub force: bool,
    /// Write the comparison as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// Write the comparison as Markdown; - is standard output
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<Destination>,
    /// Write the comparison as an HTML page; - is standard output
    #[arg(long, value_name = "FILE")]
    pub html: Option<Destination>,
}

#[derive(Debug, Args)]
pub struct SoakArguments {
    /// How long to measure if no command is given
    #[arg(
        long = "for",
        alias = "duration",
        value_name = "TIME",
        default_value = "10s",
        value_parser = duration
    )]
    pub time: Duration,
    /// Run COMMAND this often, and print its cost with an interval [default with --versus: 20, with
    /// --baseline: 50]
    #[arg(
        long,
        value_name = "N",
        requires = "command",
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    pub runs: Option<u32>,
    /// Shell command to run in turn with COMMAND, and to compare it with
    #[arg(long, value_name = "SHELL COMMAND", requires = "command")]
    pub versus: Option<String>,
    /// Print the cost of a MiB that this network device received and sent
    #[arg(long, value_name = "DEVICE", requires = "command", conflicts_with = "bytes")]
    pub per_mib_of: Option<String>,
    /// Print the cost of a MiB if each run moves this much, such as 1GiB
    #[arg(long, value_name = "SIZE", requires = "command")]
    pub bytes: Option<Size>,
    /// Compare the cost with that in this file, which an earlier --runs with --json has written
    #[arg(long, value_name = "FILE", requires = "command")]
    pub baseline: Option<PathBuf>,
    /// Exit with 1 if the cost is shown to be higher than the baseline's, and by more than this;
    /// with 3 if the costs cannot be compared
    ///
    /// The interval of the ratio has to exclude equality, and the median has to exceed the limit.
    #[arg(long, value_name = "PERCENT", requires = "baseline", value_parser = percent)]
    pub fail_above: Option<f64>,
    /// Do not wait for another haul that measures on this machine; the figures of both are wrong
    #[arg(long)]
    pub force: bool,
    /// File that every run reads as standard input; without it, several runs read /dev/null
    #[arg(long, value_name = "FILE", requires = "command")]
    pub input: Option<PathBuf>,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// Verify the meter: print expected and measured values of known loads, then which accounts
    /// include a load of interrupts
    #[arg(long, conflicts_with = "command")]
    pub self_check: bool,
    /// Command to run; the load is measured until it ends
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct PlanArguments {
    /// Make the plan from this JSON report of haul bench send instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    pub from: Option<PathBuf>,
    /// Plan file; - is standard output [default: haul-plan.json]
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// Predict how many cores each path needs for this rate, such as 100gbit; uses the plan file if
    /// it exists
    #[arg(long, value_name = "RATE")]
    pub rate: Option<Rate>,
    /// Check whether the kernel, CPU or network cards changed since the plan file was made; exit
    /// code 1 if so
    #[arg(long, conflicts_with = "rate")]
    pub check: bool,
    /// Time limit, such as 90s; rows with fewer than 9 rounds by then have wider intervals or none
    /// [default: 6m; a quiet machine needs 4m]
    #[arg(
        long = "for",
        value_name = "TIME",
        value_parser = duration,
        conflicts_with_all = ["from", "check"]
    )]
    pub time: Option<Duration>,
    /// Measure each row this often, at least 9, instead of by time
    #[arg(long, value_name = "N", conflicts_with_all = ["from", "check", "rate", "time"])]
    pub rounds: Option<usize>,
    /// Write the plan even if it was off by over 15 % in more than a third of its tests, or if the
    /// machine was too noisy for a verdict
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Destination host of the data: a name or an address
    #[arg(long, value_name = "HOST")]
    pub peer: Option<String>,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
}

#[derive(Debug, Args)]
pub struct LabArguments {
    /// MTU of the link in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    pub mtu: u32,
    /// Limit the link to this rate, such as 1gbit
    #[arg(long)]
    pub rate: Option<Rate>,
    /// Default congestion control of sockets on both hosts [default: the machine's own]
    #[arg(long, value_name = "NAME")]
    pub congestion: Option<String>,
    /// Drop this share of the packets, such as 0.1%
    #[arg(long, value_name = "PERCENT")]
    pub loss: Option<Loss>,
    /// Shell command to run on the receiving host at the same time; it is killed when COMMAND ends
    #[arg(long, value_name = "SHELL COMMAND")]
    pub receiver: Option<String>,
    /// Command to run on the sending host; the environment variable HAUL_PEER has the address of
    /// the receiving host
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Returns every experiment with its default arguments.
pub fn all_experiments() -> Result<Vec<Experiment>, Failure> {
    let parse_experiment = |name: &str| Arguments::try_parse_from(["haul", "bench", name]);
    let names =
        ["send", "receive", "forward", "profile", "interrupts", "settings", "loan", "checksum"];
    let parsed =
        names.map(|name| match parse_experiment(name).map(|arguments| arguments.command) {
            Ok(Command::Bench(arguments)) => arguments.experiment.ok_or(name),
            _ => Err(name),
        });
    let not_parsed = |name| Failure::failed(format!("experiment {name} needs an argument"));
    parsed.into_iter().map(|experiment| experiment.map_err(not_parsed)).collect()
}

/// The command line's definition: flags, texts and subcommands.
pub fn definition() -> clap::Command {
    let width = usize::from(output::terminal_width().min(output::WIDTH_DEFAULT));
    Arguments::command().bin_name("haul").term_width(width)
}

/// Parses the command line. `--help` and `--version` print their text and end the process.
///
/// A usage error becomes a one-line [`Failure`].
pub fn parse() -> Result<Arguments, Failure> {
    // -h is an option of push and pull, as of rsync. Alone, it asks for help.
    let mut words: Vec<_> = std::env::args_os().collect();
    let copies = match &words[..] {
        [_, command, _] => command == "push" || command == "pull",
        [_, fleet, push, _] => fleet == "fleet" && push == "push",
        _ => false,
    };
    if let Some(letter) = words.last_mut().filter(|letter| copies && *letter == "-h") {
        *letter = "--help".into();
    }
    let parsed = definition().try_get_matches_from(words).and_then(|matches| {
        Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut definition()))
    });
    parsed.map_err(|error| {
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            error.exit();
        }
        if !error.use_stderr() {
            let text = error.render();
            let text =
                if output::has_colour() { text.ansi().to_string() } else { text.to_string() };
            match output::print(&text) {
                Ok(()) => std::process::exit(0),
                Err(failure) => return failure,
            }
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

/// Parses a percentage, with or without the sign: `5%`, `0.5`.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    match number.parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err(format!("{text:?} is not a percentage between 0 and 100, such as 5%")),
    }
}

/// Parses a workload. File names are bytes.
fn workload() -> impl TypedValueParser<Value = Workload> {
    OsStringValueParser::new().try_map(|text| Workload::parse(&text))
}

fn duration(text: &str) -> Result<Duration, ParseQuantityError> {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    haul_units::parse_time(text, Duration::from_millis(100)..=DAY)
}
