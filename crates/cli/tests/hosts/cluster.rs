//! Hosts on this machine: namespaces that a switch joins, each with its network, its processes, and
//! memory at /srv for its files.
//!
//! Nothing of the hosts is left after the test: they end with their first processes.

use crate::running::Running;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait for a host.
const LIMIT: Duration = Duration::from_secs(60);

/// One cluster at a time, because tests measure how long hosts take.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A switch, the host `head` (number 0), and other hosts from number 1.
pub struct Cluster {
    /// For files that all hosts share.
    pub folder: TempDir,
    switch: Host,
    hosts: Vec<Host>,
    _turn: MutexGuard<'static, ()>,
}

struct Host {
    name: String,
    /// The first process, as this machine counts processes.
    pid: u32,
    unshare: Running,
}

impl Cluster {
    /// Starts so many hosts besides head, each with an ssh server. `rate` limits each link, such as
    /// 200mbit. `None`, with a line, if this machine cannot have namespaces.
    pub fn start(count: usize, rate: Option<&str>) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: only root can make hosts out of namespaces");
            return None;
        }
        for name in ["ip", "nft", "tc", "unshare", "nsenter", "sshd", "ssh-keygen"] {
            if crate::program::program(name).is_none() {
                eprintln!("SKIPPED: there is no {name} (ci/install)");
                return None;
            }
        }
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let names = (0..=count).map(|number| format!("{} host{number}\n", Self::address(number)));
        let names = format!("127.0.0.1 localhost\n{}", names.collect::<Vec<_>>().concat());
        fs::write(folder.path().join("names"), names).unwrap();
        let switch = Host::start("switch", folder.path());
        let start = |number| Host::start(&format!("host{number}"), folder.path());
        let hosts = (0..=count).map(start).collect();
        let cluster = Self { folder, switch, hosts, _turn: turn };
        cluster.switch.run("ip link add bridge type bridge && ip link set bridge up");
        for number in 0..=count {
            cluster.link(number, rate);
        }
        cluster.start_ssh();
        Some(cluster)
    }

    /// The address of a host.
    pub fn address(number: usize) -> String {
        format!("10.77.0.{}", number + 1)
    }

    fn link(&self, number: usize, rate: Option<&str>) {
        let (host, address) = (&self.hosts[number], Self::address(number));
        let (name, pid) = (&host.name, host.pid);
        self.switch.run_in_network(&format!(
            "ip link add {name} type veth peer name eth0 netns {pid} && \
             ip link set {name} master bridge up"
        ));
        host.run(&format!(
            "ip link set lo up && ip address add {address}/24 dev eth0 && ip link set eth0 up"
        ));
        if let Some(rate) = rate {
            self.set_rate(number, rate);
        }
    }

    /// Limits the link of a host in both directions.
    pub fn set_rate(&self, number: usize, rate: &str) {
        let limit = format!("root tbf rate {rate} burst 256kb latency 20ms");
        let host = &self.hosts[number];
        self.switch.run_in_network(&format!("tc qdisc replace dev {} {limit}", host.name));
        host.run(&format!("tc qdisc replace dev eth0 {limit}"));
    }

    /// Cuts the link of a host, so that its peers see silence.
    pub fn cut(&self, number: usize) {
        self.switch.run_in_network(&format!("ip link set {} down", self.hosts[number].name));
    }

    /// Undoes [`Cluster::cut`].
    pub fn restore(&self, number: usize) {
        self.switch.run_in_network(&format!("ip link set {} up", self.hosts[number].name));
    }

    /// Ends all processes of a host.
    pub fn kill(&mut self, number: usize) {
        let _ = self.hosts[number].unshare.0.kill();
        let _ = self.hosts[number].unshare.0.wait();
    }

    fn start_ssh(&self) {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        for key in ["host", "user"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]);
            assert!(command.status().unwrap().success());
        }
        let server = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPidFile none\n\
             PermitRootLogin prohibit-password\nMaxStartups 100\n",
            path("host"),
            path("user.pub")
        );
        fs::write(path("sshd"), server).unwrap();
        let sshd = crate::program::program("sshd").unwrap();
        for host in &self.hosts[1..] {
            host.run(&format!("mkdir -p /run/sshd && {} -f {}", sshd.display(), path("sshd")));
        }
    }

    /// What `haul push -e` takes.
    pub fn ssh(&self) -> String {
        format!(
            "ssh -F none -o StrictHostKeyChecking=no -o BatchMode=yes -o LogLevel=ERROR \
             -o UserKnownHostsFile=/dev/null -i {}",
            self.folder.path().join("user").display()
        )
    }

    /// A command on a host.
    pub fn command(&self, number: usize, program: &str) -> Command {
        self.hosts[number].command(program)
    }

    /// Runs a line of sh on a host, and returns its output.
    pub fn sh(&self, number: usize, line: &str) -> Output {
        self.command(number, "sh").args(["-c", line]).output().unwrap()
    }

    /// Whether a file of a host has the content of a file that all hosts share.
    pub fn has_copy(&self, number: usize, original: &Path, copy: &str) -> bool {
        let mut command = self.command(number, "cmp");
        command.arg("-s").arg(original).arg(copy).status().unwrap().success()
    }

    /// The bytes that a host sent.
    pub fn sent_bytes(&self, number: usize) -> u64 {
        let output = self.sh(number, "awk '/eth0/ { print $10 }' /proc/net/dev");
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    /// The processes of haul on a host.
    pub fn has_haul(&self, number: usize) -> bool {
        self.sh(number, "pgrep -x haul").status.success()
    }
}

impl Host {
    fn start(name: &str, folder: &Path) -> Self {
        // The first process collects ended processes while it waits.
        let script = format!(
            "mount -t proc proc /proc; mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /srv; \
             mount --bind {}/names /etc/hosts; hostname {name}; \
             while :; do sleep 1000 & wait; done",
            folder.display()
        );
        let mut command = Command::new("unshare");
        command.args(["--net", "--uts", "--mount", "--ipc", "--pid", "--fork"]);
        command.args(["--kill-child=KILL", "sh", "-c", &script]).stderr(Stdio::null());
        let unshare = Running::start(&mut command);
        let deadline = Instant::now() + LIMIT;
        let children = format!("/proc/{0}/task/{0}/children", unshare.0.id());
        loop {
            assert!(Instant::now() < deadline, "host {name} does not start");
            let pid = fs::read_to_string(&children).unwrap_or_default().trim().parse();
            if let Ok(pid) = pid {
                let host = Self { name: name.to_owned(), pid, unshare };
                // The name is the last thing that the first process sets.
                while host.command("hostname").output().unwrap().stdout
                    != format!("{name}\n").as_bytes()
                {
                    assert!(Instant::now() < deadline, "host {name} has another name");
                    thread::sleep(Duration::from_millis(10));
                }
                return host;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string()]);
        command.args(["--net", "--uts", "--mount", "--ipc", "--pid", "--", program]);
        command
    }

    /// Runs a line of sh in the network of the host, which must succeed. Processes have the numbers
    /// of this machine.
    fn run_in_network(&self, line: &str) {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--net", "--", "sh", "-c", line]);
        self.check(&command.output().unwrap(), line);
    }

    /// Runs a line of sh, which must succeed.
    fn run(&self, line: &str) {
        self.check(&self.command("sh").args(["-c", line]).output().unwrap(), line);
    }

    fn check(&self, output: &Output, line: &str) {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {line}: {errors}", self.name);
    }
}
