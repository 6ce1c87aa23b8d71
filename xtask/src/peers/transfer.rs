//! `cargo xtask peers transfer`: compares the time and the cost of copies between two hosts.
//!
//! An sshd and a daemon of rsync run on the receiving host of a lab, and the programs on the
//! sending host, in interleaved rounds. Each host has one CPU. The CPU time is the time of both
//! CPUs with all interrupts, less what the idle CPUs use. On a link with a delay only the time is
//! measured, because the threads of the meter delay the programs that pass packets on.

use crate::peers::LabArguments;
use haul_bench::Estimate;
use haul_lab::{Lab, LabError, Loss, Running, Settings};
use haul_soak::Meter;
use std::fmt::Write as _;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout until the servers listen.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Duration of the calibration of the idle machine, before and after each measurement.
const CALIBRATION: Duration = Duration::from_millis(200);
/// Ports of sshd and of rsync's daemon.
const SSH_PORT: u16 = 2222;
const RSYNC_PORT: u16 = 8730;
/// The number of small files.
const FILES: usize = 20_000;
/// The bytes of the large file.
const LARGE_BYTES: u64 = 2 << 30;

/// What is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferTrial {
    /// One file of 2 GiB.
    LargeFile,
    /// 20,000 files of 1 to 64 KiB.
    SmallFiles,
}

impl TransferTrial {
    pub const ALL: [Self; 2] = [Self::LargeFile, Self::SmallFiles];

    pub fn name(self) -> &'static str {
        match self {
            Self::LargeFile => "2GiB",
            Self::SmallFiles => "20000-files",
        }
    }

    fn write(self, folder: &Path) -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let mut random = fastrand::Rng::with_seed(7);
        let mut block = vec![0; 1 << 20];
        random.fill(&mut block);
        match self {
            Self::LargeFile => {
                let mut file = fs::File::create(folder.join("file"))?;
                for _ in 0..LARGE_BYTES >> 20 {
                    block[..8].copy_from_slice(&random.u64(..).to_le_bytes());
                    std::io::Write::write_all(&mut file, &block)?;
                }
            }
            Self::SmallFiles => {
                for index in 0..FILES {
                    let folder = folder.join(format!("{:02}/{:02}", index % 20, index / 20 % 25));
                    if index < 500 {
                        fs::create_dir_all(&folder)?;
                    }
                    let bytes = 1 << random.u32(10..=16);
                    let start = random.usize(..block.len() - bytes);
                    fs::write(folder.join(index.to_string()), &block[start..start + bytes])?;
                }
            }
        }
        Ok(())
    }
}

/// A way to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copier {
    pub name: &'static str,
    /// A command of sh. Its variables: SRC and DST, the folders; HAUL; SSH, the command with its
    /// options; ADDRESS, of the other host, whose name for ssh is `target`.
    command: &'static str,
}

pub const COPIERS: [Copier; 7] = [
    copier("haul", "$HAUL push -aq -e \"$SSH\" --remote-haul $HAUL $SRC/ target:$DST"),
    copier(
        "haul-plain",
        "$HAUL push -aq --plain -e \"$SSH\" --remote-haul $HAUL $SRC/ target:$DST",
    ),
    copier(
        "haul-ssh",
        "$HAUL push -aq --streams 0 -e \"$SSH\" --remote-haul $HAUL $SRC/ target:$DST",
    ),
    copier("rsync-daemon", "rsync -aW $SRC/ rsync://$ADDRESS:8730/scratch/copy/"),
    copier("rsync-ssh", "rsync -aW -e \"$SSH\" $SRC/ target:$DST"),
    copier("rsync-ssh-gcm", "rsync -aW -e \"$SSH -c aes128-gcm@openssh.com\" $SRC/ target:$DST"),
    copier("tar-ssh", "tar -C $SRC -cf - . | $SSH target \"mkdir -p $DST && tar -C $DST -xf -\""),
];

const fn copier(name: &'static str, command: &'static str) -> Copier {
    Copier { name, command }
}

/// What is compared.
#[derive(Debug)]
pub struct TransferPlan {
    pub trials: Vec<TransferTrial>,
    pub copiers: Vec<Copier>,
    pub lab: LabArguments,
    pub rate: Option<u64>,
    pub loss: Option<Loss>,
    pub haul: PathBuf,
}

/// A time and a CPU time, in seconds.
#[derive(Debug, Clone, Copy)]
struct Cost {
    wall: f64,
    cpu: f64,
}

/// Two hosts with servers, and folders in memory.
struct Hosts {
    lab: Lab,
    scratch: tempfile::TempDir,
    haul: PathBuf,
    /// The servers, which end with the comparison.
    servers: Vec<Running>,
}

/// Runs all trials and prints a table for each.
pub fn run(plan: &TransferPlan) -> Result<(), String> {
    let hosts = Hosts::start(plan)?;
    let cpus = [hosts.lab.sender.cpu(), hosts.lab.receiver.cpu()];
    let meter = match plan.lab.delay_ms {
        Some(_) => None,
        None => Some(Meter::start(&cpus).map_err(|error| error.to_string())?),
    };
    for &trial in &plan.trials {
        let source = hosts.path("source");
        trial.write(&source).map_err(|error| format!("{}: {error}", source.display()))?;
        let mut costs = vec![Vec::new(); plan.copiers.len()];
        for round in 0..=plan.lab.rounds {
            for (copier, costs) in plan.copiers.iter().zip(&mut costs) {
                eprintln!("{}: round {round}, {}", trial.name(), copier.name);
                let cost = hosts.measure(meter.as_ref(), copier)?;
                // The first round does not count: it may touch memory that was never used before.
                if round == 0 {
                    hosts.compare(copier)?;
                } else {
                    costs.push(cost);
                }
            }
        }
        print(trial, &plan.copiers, &costs);
        fs::remove_dir_all(&source).map_err(|error| error.to_string())?;
    }
    Ok(())
}

impl Hosts {
    fn start(plan: &TransferPlan) -> Result<Self, String> {
        let failed = |error: LabError| error.to_string();
        let LabArguments { mtu, delay_ms, congestion, .. } = &plan.lab;
        let delay = delay_ms.map(Duration::from_millis);
        haul_lab::enter_user_namespace().map_err(failed)?;
        let settings = Settings::default().with_mtu(*mtu).with_delay(delay);
        let lab = Lab::veth(&settings).map_err(failed)?;
        for host in [&lab.sender, &lab.receiver] {
            host.set_sysctl("net.ipv4.tcp_congestion_control", congestion).map_err(failed)?;
        }
        if let Some(rate) = plan.rate {
            lab.set_rate(Some(rate)).map_err(failed)?;
        }
        if let Some(loss) = plan.loss {
            lab.set_loss(loss).map_err(failed)?;
        }
        // In memory, so that no disk is measured.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let scratch = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
        let haul = scratch.path().join("haul");
        fs::copy(&plan.haul, &haul).map_err(|error| format!("{}: {error}", plan.haul.display()))?;
        let mut hosts = Self { lab, scratch, haul, servers: Vec::new() };
        hosts.start_servers().map_err(|error| error.to_string())??;
        Ok(hosts)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Starts sshd and rsync's daemon. The outer error is one of the files.
    fn start_servers(&mut self) -> std::io::Result<Result<(), String>> {
        for name in ["host", "user"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(self.path(name)).status()?;
        }
        let address = self.lab.receiver.address();
        let folder = self.scratch.path().display().to_string();
        let sshd = format!(
            "ListenAddress {address}\nPort {SSH_PORT}\nHostKey {folder}/host\n\
             AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PermitRootLogin prohibit-password\n"
        );
        fs::write(self.path("sshd.conf"), sshd)?;
        let ssh = format!(
            "Host target\n HostName {address}\n Port {SSH_PORT}\n IdentityFile {folder}/user\n \
             StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        );
        fs::write(self.path("ssh.conf"), ssh)?;
        let rsyncd = format!(
            "port = {RSYNC_PORT}\nuse chroot = no\nuid = 0\ngid = 0\n[scratch]\npath = {folder}\n\
             read only = no\n"
        );
        fs::write(self.path("rsyncd.conf"), rsyncd)?;
        // The start script of sshd creates the directory of its privilege separation.
        fs::create_dir_all("/run/sshd")?;
        let mut sshd = Command::new("/usr/sbin/sshd");
        sshd.args(["-D", "-f"]).arg(self.path("sshd.conf")).stderr(Stdio::null());
        let mut rsyncd = Command::new("rsync");
        rsyncd.args(["--daemon", "--no-detach", "--config"]).arg(self.path("rsyncd.conf"));
        for (command, port) in [(sshd, SSH_PORT), (rsyncd, RSYNC_PORT)] {
            match self.lab.receiver.start_program(command) {
                Ok(running) => self.servers.push(running),
                Err(error) => return Ok(Err(error.to_string())),
            }
            if let Err(problem) = self.wait_until_listening(port) {
                return Ok(Err(problem));
            }
        }
        Ok(Ok(()))
    }

    fn wait_until_listening(&self, port: u16) -> Result<(), String> {
        let address = (self.lab.receiver.address(), port);
        let deadline = Instant::now() + LISTEN_TIMEOUT;
        while Instant::now() < deadline {
            let connected = self.lab.sender.run(|| TcpStream::connect(address).is_ok());
            if connected.map_err(|error| error.to_string())? {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(50));
        }
        Err(format!("no server listens at port {port}"))
    }

    fn measure(&self, meter: Option<&Meter>, copier: &Copier) -> Result<Cost, String> {
        let copy = self.path("copy");
        if copy.exists() {
            fs::remove_dir_all(&copy).map_err(|error| format!("{}: {error}", copy.display()))?;
        }
        let mut command = Command::new("sh");
        command
            .args(["-c", copier.command])
            .env("SRC", self.path("source"))
            .env("DST", &copy)
            .env("HAUL", &self.haul)
            .env("SSH", format!("ssh -F {}", self.path("ssh.conf").display()))
            .env("ADDRESS", self.lab.receiver.address().to_string());
        let mut run = || {
            let status = self.lab.sender.run_program(&mut command);
            match status.map_err(|error| error.to_string())? {
                Ok(status) if status.success() => Ok(()),
                Ok(status) => Err(format!("{}: {status}", copier.name)),
                Err(error) => Err(format!("{}: {error}", copier.name)),
            }
        };
        let Some(meter) = meter else {
            let begun = Instant::now();
            run()?;
            return Ok(Cost { wall: begun.elapsed().as_secs_f64(), cpu: f64::NAN });
        };
        let failed = |error: haul_soak::SoakError| error.to_string();
        let calibration = meter.calibrate(CALIBRATION);
        let before = meter.snapshot().map_err(failed)?;
        run()?;
        let after = meter.snapshot().map_err(failed)?;
        let interval = after.since(&before);
        let load = interval.load(&calibration.middle(&meter.calibrate(CALIBRATION)));
        let wall = interval.wall.as_secs_f64();
        Ok(Cost { wall, cpu: load.total_percent() / 100.0 * wall })
    }

    /// Fails unless the copy equals the source.
    fn compare(&self, copier: &Copier) -> Result<(), String> {
        let mut diff = Command::new("diff");
        let status = diff.args(["-rq"]).arg(self.path("source")).arg(self.path("copy")).status();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(format!("{}: the copy differs from the source", copier.name)),
            Err(error) => Err(format!("diff: {error}")),
        }
    }
}

/// Prints the table of a trial: for each copier the time and the CPU time, and the ratios of the
/// first two copiers to it.
fn print(trial: TransferTrial, copiers: &[Copier], costs: &[Vec<Cost>]) {
    let names: Vec<_> = copiers.iter().take(2).map(|copier| copier.name).collect();
    println!("\n{}: s, CPU s of both hosts, then the ratios of {}", trial.name(), names.join(", "));
    for (copier, of_copier) in copiers.iter().zip(costs) {
        let median = |figure: fn(&Cost) -> f64| {
            let figures: Vec<_> = of_copier.iter().map(figure).collect();
            Estimate::of(&figures).map_or(f64::NAN, |estimate| estimate.median)
        };
        let cpu_text = match median(cpu) {
            cpu if cpu.is_nan() => "-".to_owned(),
            cpu => format!("{cpu:.2}"),
        };
        let mut line = format!("{:<14} {:>7.2} {cpu_text:>7}", copier.name, median(wall));
        for of_haul in costs.iter().take(names.len()) {
            for figure in [wall, cpu] {
                // Within a round, because both met the same machine state there.
                let pairs = of_haul.iter().zip(of_copier);
                let ratios: Vec<_> = pairs.map(|(a, b)| figure(a) / figure(b)).collect();
                let Some(ratio) = Estimate::of(&ratios) else { continue };
                let Estimate { median, low, high, .. } = ratio;
                let _ = write!(line, "  {median:.2} ({low:.2}–{high:.2})");
            }
        }
        println!("{line}");
    }
}

fn wall(cost: &Cost) -> f64 {
    cost.wall
}

fn cpu(cost: &Cost) -> f64 {
    cost.cpu
}
