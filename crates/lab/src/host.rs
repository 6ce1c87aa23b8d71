//! A host of the lab: a network namespace, a CPU and an address.

use crate::advice::namespace_fix;
use crate::cpus;
use crate::error::LabError;
use crate::netlink;
use crate::steer;
use haul_lab_sys::process_stat::ProcessStat;
use rustix::thread::LinkNameSpaceType;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// One of the lab's two hosts.
#[derive(Debug)]
pub struct Host {
    cpu: usize,
    address: IpAddr,
    device: &'static str,
    /// `None` for a host on the loopback device of the process's own namespace.
    namespace: Option<OwnedFd>,
}

impl Host {
    /// Creates a host in a separate network namespace, whose received packets are steered to `cpu`.
    pub(crate) fn in_new_namespace(cpu: usize, address: IpAddr) -> Result<Self, LabError> {
        let namespace = run_on_new_thread(|| {
            haul_lab_sys::namespace::unshare_network().map_err(namespace_error)?;
            // Devices take the default mask when they are created, so it is set before.
            steer::set_default_mask(cpu);
            netlink::set_up("lo")?;
            File::open("/proc/thread-self/ns/net")
                .map(OwnedFd::from)
                .map_err(LabError::step("opening the network namespace"))
        })?;
        Ok(Self { cpu, address, device: "haul0", namespace: Some(namespace) })
    }

    /// Creates a host on the loopback device of the process's own namespace.
    pub(crate) fn on_loopback(cpu: usize, address: IpAddr) -> Self {
        Self { cpu, address, device: "lo", namespace: None }
    }

    /// CPU of the host.
    pub fn cpu(&self) -> usize {
        self.cpu
    }

    /// Address at which the other host reaches this one.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Name of the host's network device, inside its namespace.
    pub fn device(&self) -> &str {
        self.device
    }

    pub(crate) fn namespace(&self) -> Option<&OwnedFd> {
        self.namespace.as_ref()
    }

    /// Moves the calling thread permanently to this host: to its namespace and its CPU.
    pub fn enter(&self) -> Result<(), LabError> {
        if let Some(namespace) = &self.namespace {
            rustix::thread::move_into_link_name_space(
                namespace.as_fd(),
                Some(LinkNameSpaceType::Network),
            )
            .map_err(|errno| namespace_error(errno.into()))?;
        }
        cpus::pin_to(self.cpu)
            .map_err(LabError::step(format!("pinning a thread to CPU {}", self.cpu)))
    }

    /// Runs `work` on a new thread of this host and waits for it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        run_on_new_thread(|| {
            self.enter()?;
            Ok(work())
        })
    }

    /// Sets a sysctl that is separate for each network namespace, such as `net.ipv4.tcp_wmem`, on
    /// this host only.
    ///
    /// Needs no privilege. Sockets created before keep the old value.
    pub fn set_sysctl(&self, name: &str, value: &str) -> Result<(), LabError> {
        if self.namespace.is_none() {
            return Err(LabError::Loopback("a sysctl"));
        }
        let setting_error = |error| LabError::Setting { name: name.into(), error };
        let file = Path::new("/proc/sys").join(name.replace('.', "/"));
        self.run(|| fs::write(file, value))?.map_err(setting_error)
    }

    /// Runs a program on this host until it ends. The program is killed if this process ends.
    pub fn run_program(&self, command: &mut Command) -> Result<io::Result<ExitStatus>, LabError> {
        self.run_program_with(command, |mut child| child.wait())
    }

    /// Like [`Self::run_program`]. `wait` waits for the program.
    pub fn run_program_with(
        &self,
        command: &mut Command,
        wait: impl FnOnce(Child) -> io::Result<ExitStatus> + Send,
    ) -> Result<io::Result<ExitStatus>, LabError> {
        self.run(|| {
            self.show_own_devices();
            haul_lab_sys::child::dies_with_parent(command).spawn().and_then(wait)
        })
    }
}

impl Host {
    /// Makes `/sys` show the devices of this host to the programs that the calling thread starts.
    ///
    /// In a container the kernel refuses the mount. Then the programs see the machine's devices,
    /// and a line on standard error names the reason.
    fn show_own_devices(&self) {
        if self.namespace.is_none() {
            return;
        }
        if let Err(error) = steer::mount_own_sysfs() {
            static IS_TOLD: AtomicBool = AtomicBool::new(false);
            if !IS_TOLD.swap(true, Relaxed) {
                eprintln!("haul: /sys shows the machine's devices to programs of the lab: {error}");
            }
        }
    }

    /// Starts a program on this host, in a separate process group, and returns while it runs.
    pub fn start_program(&self, mut command: Command) -> Result<Running, LabError> {
        use std::os::unix::process::CommandExt;
        let program = command.get_program().to_string_lossy().into_owned();
        let (started_tx, started_rx) = mpsc::channel();
        let namespace = match &self.namespace {
            Some(namespace) => Some(
                namespace
                    .try_clone()
                    .map_err(LabError::step("duplicating a namespace's descriptor"))?,
            ),
            None => None,
        };
        let host = Self { namespace, ..*self };
        // The program is killed when the thread that starts it ends, so that thread lives until the
        // program ends.
        let waiter = thread::Builder::new()
            .name("haul-program".into())
            .spawn(move || {
                let spawned = host.enter().and_then(|()| {
                    host.show_own_devices();
                    haul_lab_sys::child::dies_with_parent(command.process_group(0))
                        .spawn()
                        .map_err(LabError::step(format!("starting {program}")))
                });
                match spawned {
                    Ok(mut child) => {
                        let _ = started_tx.send(Ok(rustix::process::Pid::from_child(&child)));
                        child.wait().ok()
                    }
                    Err(error) => {
                        let _ = started_tx.send(Err(error));
                        None
                    }
                }
            })
            .map_err(LabError::step("starting a thread"))?;
        let process = started_rx
            .recv()
            .map_err(|error| LabError::step("starting a program")(io::Error::other(error)))??;
        Ok(Running { process, waiter: Some(waiter) })
    }
}

/// Runs `work` on a separate thread, whose namespaces and CPU it may change.
fn run_on_new_thread<T: Send>(
    work: impl FnOnce() -> Result<T, LabError> + Send,
) -> Result<T, LabError> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("haul-host".into())
            .spawn_scoped(scope, work)
            .map_err(LabError::step("starting a thread"))?
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Whether this process has the capability to create network namespaces.
pub(crate) fn can_create_namespaces() -> bool {
    // The capability is checked instead of creating one: a process that starts a thread can no
    // longer create a separate user namespace.
    rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN))
}

/// Builds the error for a refused namespace, with advice on how to allow it.
pub(crate) fn namespace_error(error: io::Error) -> LabError {
    let advice = match error.kind() {
        io::ErrorKind::InvalidInput => {
            "it must be made before the process starts a second thread".into()
        }
        io::ErrorKind::StorageFull => {
            "raise sysctl user.max_user_namespaces and user.max_net_namespaces".into()
        }
        _ => namespace_fix(),
    };
    LabError::NoNamespaces { error, advice }
}

/// A program that runs on a host; dropping this kills it.
#[derive(Debug)]
pub struct Running {
    process: rustix::process::Pid,
    waiter: Option<thread::JoinHandle<Option<ExitStatus>>>,
}

impl Running {
    /// Reads the memory that the program and the processes that it started hold now, in bytes.
    ///
    /// Pages that several processes share count in proportion (`Pss` in /proc/PID/smaps_rollup,
    /// Linux 4.14).
    pub fn memory_bytes(&self) -> u64 {
        let kib = self.processes().map(|(process, _)| {
            let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup"));
            let rollup = rollup.unwrap_or_default();
            let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
            line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
        });
        kib.sum::<u64>() * 1024
    }

    /// Reads the CPU time that the program and the running processes that it started have used, to
    /// 10 ms or the kernel's clock tick (/proc/PID/stat).
    pub fn cpu_time(&self) -> Duration {
        let ticks: u64 = self.processes().map(|(_, stat)| stat.cpu_ticks).sum();
        let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        Duration::from_secs_f64(seconds)
    }

    /// The processes of the program's group.
    fn processes(&self) -> impl Iterator<Item = (u32, ProcessStat)> {
        let group = self.process.as_raw_nonzero().get().unsigned_abs();
        ProcessStat::all().filter(move |(_, stat)| stat.group == group)
    }

    /// Kills the program and waits until it ends. Returns its exit status if it ended by itself.
    pub fn kill(&mut self) -> Option<ExitStatus> {
        use std::os::unix::process::ExitStatusExt;
        let waiter = self.waiter.take()?;
        // Also if it has ended: processes that it started in its group may still run.
        let _ = rustix::process::kill_process_group(self.process, rustix::process::Signal::KILL);
        let status = waiter.join().ok().flatten();
        status.filter(|status| status.signal() != Some(rustix::process::Signal::KILL.as_raw()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}
