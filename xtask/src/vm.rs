//! `cargo xtask vm`: tests of the library and of the command in a virtual machine.
//!
//! On veth the kernel always copies what `MSG_ZEROCOPY` sends, and this machine's kernel may lack
//! kTLS and netem, or be newer than the one that most users have. The virtual machine (the guest)
//! runs Debian's kernel under software emulation. Its network card (virtio-net on a tap) supports
//! scatter-gather, and its first process is this program. The guest lends buffers for sends to the
//! host and reports whether each loan was copied. Then it runs tests of the project, statically
//! linked as the packages are, or one command of haul. Because the CPU is emulated, times measured
//! in the guest are not those of a real one.
//!
//! `ci/install` installs the requirements: qemu-system-x86, and Debian's kernel, unpacked and not
//! installed ([`kernel`]). The tap is created in a new network namespace, so the host's network
//! configuration does not change.

mod archive;
mod counts;
mod guest;
mod guest_tools;
mod kernel;
mod peer;
mod power_cut;
mod python;

pub use guest::run_if_first_process;
pub use power_cut::{connect, run as power_cuts};

use crate::static_build;
use archive::Archive;
use kernel::Kernel;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Address of the host on the tap.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
/// Address of the guest on the tap.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const TAP: &str = "tap0";
/// Timeout of the tests. Booting takes about ten seconds under emulation.
const TESTS_TIMEOUT: Duration = Duration::from_secs(600);
/// Timeout of a command instead.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(3600);
/// File in the initramfs with the arguments of the command, one a line.
const ARGUMENTS_FILE: &str = "arguments";
/// First line of the guest's first process.
const STARTED: &str = "haul guest: started";
/// The time in which a guest with KVM starts. A guest that needs longer is emulated.
const KVM_START_TIMEOUT: Duration = Duration::from_secs(10);
/// Last line of the guest's report: passed, or failed and the reason.
const PASSED: &str = "haul guest: passed";
const FAILED: &str = "haul guest: FAILED";
/// Kernel modules that the guest loads, together with their dependencies: drivers of the network
/// card, then the modules under test.
const MODULES: [&str; 13] = [
    "virtio_pci",
    "virtio_net",
    "veth",
    "tls",
    "aesni_intel",
    "gcm",
    "ctr",
    "ghash_generic",
    "chacha20poly1305",
    "chacha_generic",
    "poly1305_generic",
    "sch_netem",
    "sch_fq",
];
/// File in the initramfs that lists the modules in load order, one name a line.
const MODULE_LIST_FILE: &str = "modules/in-order";
/// Programs that the guest runs, each with the Debian package that contains it.
const PROGRAMS: &[(&str, &str)] = &[
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ethtool", "ethtool"),
    ("curl", "curl"),
    ("openssl", "openssl"),
    ("sh", "dash"),
    ("bash", "bash"),
    ("cat", "coreutils"),
    ("cp", "coreutils"),
    ("false", "coreutils"),
    ("head", "coreutils"),
    ("mkfifo", "coreutils"),
    ("sleep", "coreutils"),
    ("timeout", "coreutils"),
    ("true", "coreutils"),
    ("pkill", "procps"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("taskset", "util-linux"),
];
/// A test binary that runs in the guest: its package, its name, and its arguments, separated by
/// spaces. Without arguments all its tests run.
type GuestTest = (&'static str, &'static str, &'static str);

/// The tests of what the guest has and this machine may lack: loans without a copy and kernel TLS.
const TESTS: &[GuestTest] = &[
    ("haul", "loans", ""),
    ("haul", "forwarding_tls", ""),
    ("haul-sys", "haul_sys", "ktls::"),
    ("haul-transfer", "transfer", "direct::trees"),
    ("haul-transfer", "transfer", "fan_out::a_tree"),
    ("haul-workers", "haul_workers", "tls"),
    ("haul-serve", "serve", "tls::"),
];
/// Further tests, before a release. Most show that Debian's kernel behaves as this machine's does.
/// Of the command's tests, those that measure are left out, because on an emulated CPU no round is
/// usable.
const FURTHER_TESTS: &[GuestTest] = &[
    ("haul", "paths", ""),
    ("haul", "receiving", ""),
    ("haul", "forwarding", ""),
    ("haul-server", "client", ""),
    ("haul-proxy", "proxy", "over_a_long_path"),
    ("haul-cli", "bad_input", ""),
    ("haul-cli", "bench_checksum", ""),
    ("haul-cli", "manual", ""),
    ("haul-cli", "others", "--skip a_plan"),
    ("haul-cli", RUN_TEST, "elided send_the_same"),
    ("haul-cli", "schema", ""),
    ("haul-cli", "serve", ""),
    ("haul-cli", "soak", "a_short_command an_interrupted soak_keeps the_report_names"),
];
/// The test of `haul run`, whose program uses the shared C library.
const RUN_TEST: &str = "run_random";
/// File in the initramfs whose presence makes the guest count.
const COUNTS_FILE: &str = "counts";
/// File in the initramfs whose presence also selects [`FURTHER_TESTS`].
const ALL_FILE: &str = "tests/all";
/// The command. The tests of its package call it at the path of the build.
const COMMAND: &str = "haul";

/// Errors of `cargo xtask vm`.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A requirement that `ci/install` installs is missing.
    #[error("{0} is missing: run ci/install as root")]
    Missing(String),
    /// The requested kernel is not here, or is not a kernel.
    #[error("{0}")]
    Kernel(String),
    /// An operation failed.
    #[error("{step}: {error}")]
    Step {
        /// The operation that failed.
        step: String,
        /// The I/O error.
        error: io::Error,
    },
    /// A check in the guest failed, or the guest ended early.
    #[error("{0}")]
    Guest(String),
}

/// Returns a function for `map_err` that adds the failed operation to an I/O error.
fn step(step: impl Into<String>) -> impl FnOnce(io::Error) -> VmError {
    move |error| VmError::Step { step: step.into(), error }
}

/// What the guest does, and on which kernel.
#[derive(Debug)]
pub struct Options {
    /// Version or folder of the kernel; `None` for the kernel of this Debian.
    pub kernel: Option<String>,
    /// Whether the further tests run.
    pub all: bool,
    /// Whether the guest counts instructions and bytes instead ([`counts`]).
    pub counts: bool,
    /// The arguments of haul, which then runs instead of the tests.
    pub haul: Vec<String>,
}

/// Builds the initramfs, boots the guest and prints its output. The guest runs the tests, or haul
/// with arguments if there are any, or counts.
///
/// Fails if the guest reports a failure.
pub fn run(options: &Options) -> Result<(), VmError> {
    let kernel = Kernel::select(options.kernel.as_deref())?;
    let folder = tempfile::tempdir().map_err(step("making a folder"))?;
    let (content, timeout) = match options.haul.as_slice() {
        _ if options.counts => (Content::Counts, TESTS_TIMEOUT),
        [] => (Content::Tests { all: options.all }, TESTS_TIMEOUT),
        arguments => (Content::Command(arguments), COMMAND_TIMEOUT),
    };
    let counting = options.counts.then(|| counts::Plugin::build(folder.path())).transpose()?;
    let initramfs = folder.path().join("initramfs");
    fs::write(&initramfs, build_initramfs(content, &kernel)?)
        .map_err(step("writing the initramfs"))?;
    haul_lab::enter_user_namespace()
        .map_err(|error| step("making a namespace")(io::Error::other(error)))?;
    let plugin = counting.as_ref();
    // A separate thread, because `boot` moves its thread into a new network namespace.
    let lines = thread::scope(|scope| {
        let guest = scope.spawn(|| boot(&kernel, &initramfs, plugin, timeout));
        guest.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    plugin.map_or(Ok(()), |plugin| plugin.print_table(&kernel, &lines))
}

/// Starts qemu in a new network namespace and waits for the guest's result. Returns the lines that
/// the guest printed.
fn boot(
    kernel: &Kernel,
    initramfs: &Path,
    plugin: Option<&counts::Plugin>,
    timeout: Duration,
) -> Result<Vec<String>, VmError> {
    haul_lab_sys::namespace::unshare_network().map_err(step("making a network namespace"))?;
    let port = peer::serve().map_err(step("serving the guest"))?;
    let accelerators: &[Accelerator] = if plugin.is_none() && has_virtualization() {
        &[Accelerator::Kvm, Accelerator::Tcg]
    } else {
        &[Accelerator::Tcg]
    };
    for &accelerator in accelerators {
        let mut qemu = qemu(kernel, initramfs, port, accelerator);
        if let Some(plugin) = plugin {
            plugin.load_into(&mut qemu);
        }
        qemu.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut qemu = start(&mut qemu)?;
        let console = configure_tap().and_then(|()| Console::of(&mut qemu));
        let result = match (accelerator, console) {
            (Accelerator::Kvm, Err(_)) => Ok(None),
            (Accelerator::Kvm, Ok(console)) if !console.starts_within(KVM_START_TIMEOUT) => {
                Ok(None)
            }
            (_, console) => console
                .and_then(|console| console.wait_for_result(plugin.is_none(), timeout))
                .map(Some),
        };
        // Also stops a guest that did not report a result.
        let _ = qemu.kill();
        let _ = qemu.wait();
        if let Some(lines) = result? {
            return Ok(lines);
        }
        println!("KVM does not run this kernel: the CPU is emulated");
    }
    Err(VmError::Guest("the guest does not start".into()))
}

/// What executes the instructions of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Accelerator {
    /// The CPU, by the host's kernel.
    Kvm,
    /// qemu, which emulates a CPU.
    Tcg,
}

/// Whether the CPU itself runs guests. The device of KVM alone proves nothing: a hypervisor in
/// software has the device, and does not run every kernel.
fn has_virtualization() -> bool {
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_flag = cpu_info.split_whitespace().any(|word| word == "vmx" || word == "svm");
    has_flag && fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// The command that boots a guest.
fn qemu(kernel: &Kernel, initramfs: &Path, port: u16, accelerator: Accelerator) -> Command {
    let (machine, cpu) = match accelerator {
        Accelerator::Kvm => ("q35,accel=kvm", "host"),
        Accelerator::Tcg => ("q35,accel=tcg", "max"),
    };
    // Under emulation on a busy machine, Linux's check of its timer fails at times.
    let parameters =
        format!("console=ttyS0 quiet panic=-1 no_timer_check {}={port}", guest::PORT_KEY);
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-machine", machine, "-cpu", cpu, "-m", "1024", "-smp", "2"])
        .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"])
        .args(["-netdev", &format!("tap,id=net0,ifname={TAP},script=no,downscript=no")])
        .args(["-device", "virtio-net-pci,netdev=net0,romfile="])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", &parameters]);
    qemu
}

fn start(qemu: &mut Command) -> Result<Child, VmError> {
    haul_lab_sys::child::dies_with_parent(qemu).spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => VmError::Missing("qemu-system-x86_64".into()),
        _ => step("starting qemu")(error),
    })
}

/// Waits until qemu has created the tap, then assigns the host's address to it.
fn configure_tap() -> Result<(), VmError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let address = format!("{HOST}/24");
    while !ip(&["link", "set", TAP, "up"])? {
        if Instant::now() >= deadline {
            return Err(VmError::Guest(
                "qemu created no tap: check that /dev/net/tun is accessible".into(),
            ));
        }
        thread::sleep(Duration::from_millis(50));
    }
    if !ip(&["address", "add", &address, "dev", TAP])? {
        return Err(VmError::Guest(format!("cannot assign {address} to the tap")));
    }
    Ok(())
}

/// Runs `ip` and returns whether it succeeded.
fn ip(arguments: &[&str]) -> Result<bool, VmError> {
    let status = Command::new("ip").args(arguments).stderr(Stdio::null()).status();
    status.map(|status| status.success()).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => VmError::Missing("ip (iproute2)".into()),
        _ => step("running ip")(error),
    })
}

/// The lines that the guest prints.
struct Console {
    lines: mpsc::Receiver<String>,
}

impl Console {
    fn of(qemu: &mut Child) -> Result<Self, VmError> {
        let no_output = || VmError::Guest("qemu has no output".into());
        let output = qemu.stdout.take().ok_or_else(no_output)?;
        let (line_tx, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if line_tx.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { lines })
    }

    /// The next line before a deadline.
    fn next(&self, deadline: Instant) -> Result<String, mpsc::RecvTimeoutError> {
        self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits for the first process of the guest. Returns whether the process started in time.
    fn starts_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            match self.next(deadline) {
                Ok(line) if line.contains(STARTED) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }

    /// Collects the lines until the guest reports its result, and prints them if `prints`.
    fn wait_for_result(&self, prints: bool, timeout: Duration) -> Result<Vec<String>, VmError> {
        let deadline = Instant::now() + timeout;
        let mut lines = Vec::new();
        loop {
            match self.next(deadline) {
                Ok(line) => {
                    if prints {
                        println!("{line}");
                    }
                    if line.contains(PASSED) {
                        return Ok(lines);
                    }
                    if let Some((_, reason)) = line.split_once(FAILED) {
                        return Err(VmError::Guest(format!("the guest failed{reason}")));
                    }
                    lines.push(line);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Err(VmError::Guest(format!("the guest exceeded {timeout:?}")));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let last = lines.last().map_or("", String::as_str);
                    return Err(VmError::Guest(format!(
                        "the guest ended without a result: {last}"
                    )));
                }
            }
        }
    }
}

/// What the guest does.
#[derive(Clone, Copy)]
enum Content<'a> {
    /// It runs the tests, or all of them.
    Tests { all: bool },
    /// It runs haul with these arguments.
    Command(&'a [String]),
    /// It receives files on a disk ([`power_cut`]).
    Disk,
    /// It counts instructions and bytes ([`counts`]).
    Counts,
}

/// Builds the initramfs: this program as the first process, what it runs, and the dependencies.
fn build_initramfs(content: Content<'_>, kernel: &Kernel) -> Result<Vec<u8>, VmError> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "tmp", "modules", "tests"] {
        archive.add_folder(folder);
    }
    let executable = std::env::current_exe().map_err(step("finding this program"))?;
    archive.add_program(&executable, "init")?;
    for (name, package) in PROGRAMS {
        let program = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
            .map(|folder| Path::new(folder).join(name))
            .into_iter()
            .find(|path| path.exists())
            .ok_or_else(|| VmError::Missing(format!("{name} ({package})")))?;
        archive.add_program(&program, &format!("bin/{name}"))?;
    }
    match content {
        Content::Tests { all } => {
            for (name, path) in build_tests(&tests(all))? {
                archive.add_program(&path, &name)?;
            }
            if all {
                python::add_to(&mut archive)?;
                archive.add_content(ALL_FILE, b"");
            }
        }
        Content::Command(arguments) => {
            archive.add_program(&build_command()?, &format!("bin/{COMMAND}"))?;
            archive.add_content(ARGUMENTS_FILE, arguments.join("\n").as_bytes());
        }
        Content::Disk => {
            archive.add_program(&build_command()?, &format!("bin/{COMMAND}"))?;
            archive.add_folder(power_cut::DISK_FOLDER.trim_start_matches('/'));
        }
        Content::Counts => archive.add_content(COUNTS_FILE, b""),
    }
    let disk: &[&str] = if let Content::Disk = content { &power_cut::MODULES } else { &[] };
    let (mut load_order, mut missing) = (Vec::new(), Vec::new());
    for name in MODULES.iter().chain(disk) {
        if !kernel.add_module(&mut archive, name, &mut load_order)? {
            missing.push(*name);
        }
    }
    if !missing.is_empty() {
        eprintln!("Linux {} does not have the modules {}", kernel.release, missing.join(", "));
    }
    // Tests name the first as a file that exists and is no program.
    archive.add_content("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n");
    archive.add_content("etc/hosts", b"127.0.0.1 localhost\n");
    // A test compares this page with the program, at the path that it has here.
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("crates").join("cli");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs").join("json.md");
    let content = fs::read(&page).map_err(step(format!("reading {}", page.display())))?;
    archive.add_folder(package.to_string_lossy().trim_start_matches('/'));
    archive.add_content(page.to_string_lossy().trim_start_matches('/'), &content);
    archive.add_content(MODULE_LIST_FILE, load_order.join("\n").as_bytes());
    Ok(archive.finish())
}

/// Builds the command, statically linked, and returns its path.
fn build_command() -> Result<PathBuf, VmError> {
    let triple = static_build::host_triple().map_err(VmError::Guest)?;
    let mut build = static_build::cargo("build", &triple);
    let status = build.args(["--bin", COMMAND]).status().map_err(step("running cargo"))?;
    if status.success() {
        Ok(static_build::binary(COMMAND, &triple))
    } else {
        Err(VmError::Guest("building the command failed".into()))
    }
}

/// The tests that the guest runs.
fn tests(all: bool) -> Vec<GuestTest> {
    [TESTS, if all { FURTHER_TESTS } else { &[] }].concat()
}

/// Builds the test binaries and the command, statically linked; returns the path of each in the
/// guest and here.
fn build_tests(tests: &[GuestTest]) -> Result<Vec<(String, PathBuf)>, VmError> {
    // A package's unit tests are listed under the name of its library. One build of both kinds
    // would compile the unit tests of all packages.
    let is_unit = |(package, file, _): &&GuestTest| *file == package.replace('-', "_");
    let (units, integration): (Vec<GuestTest>, Vec<GuestTest>) =
        tests.iter().copied().partition(|test| is_unit(&test));
    let mut unit_build = vec!["--lib"];
    unit_build.extend(units.iter().flat_map(|(package, ..)| ["--package", package]));
    let mut integration_build: Vec<&str> = integration
        .iter()
        .flat_map(|(package, file, _)| ["--package", package, "--test", file])
        .collect();
    if integration.iter().any(|(package, ..)| *package == "haul-cli") {
        integration_build.extend(["--bin", COMMAND]);
    }
    let mut programs = build_selected(&unit_build, &units)?;
    programs.extend(build_selected(&integration_build, &integration)?);
    if integration.iter().any(|(_, file, _)| *file == RUN_TEST) {
        programs.push(build_random_program()?);
    }
    Ok(programs)
}

/// Builds the program of [`RUN_TEST`] and returns its path in the guest, near the command as the
/// test expects, and here. The program is not statically linked, because it could not load a
/// library.
fn build_random_program() -> Result<(String, PathBuf), VmError> {
    const NAME: &str = "examples/random_program";
    let triple = static_build::host_triple().map_err(VmError::Guest)?;
    let guest = static_build::binary(NAME, &triple).display().to_string();
    let folder = static_build::binary("shared", &triple);
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(static_build::ROOT).args(["build", "--release", "--locked", "--target-dir"]);
    build.arg(&folder).args(["--package", "haul-interpose", "--example", "random_program"]);
    let status = build.status().map_err(step("running cargo"))?;
    if !status.success() {
        return Err(VmError::Guest("building the random program failed".into()));
    }
    let built = folder.join("release").join(NAME);
    Ok((guest.trim_start_matches('/').to_owned(), built))
}

/// Builds what the arguments of cargo select; returns the paths as [`build_tests`] does.
fn build_selected(
    arguments: &[&str],
    tests: &[GuestTest],
) -> Result<Vec<(String, PathBuf)>, VmError> {
    let triple = static_build::host_triple().map_err(VmError::Guest)?;
    let mut build = static_build::cargo("test", &triple);
    build.args(["--no-run", "--message-format", "json"]).args(arguments);
    // Times do not count in the guest, and these builds take two thirds of the time.
    build.envs([("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"), ("CARGO_PROFILE_RELEASE_DEBUG", "0")]);
    let output = build.stderr(Stdio::inherit()).output().map_err(step("running cargo"))?;
    if !output.status.success() {
        return Err(VmError::Guest("building the tests failed".into()));
    }
    let mut programs = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n') {
        let message: serde_json::Value = serde_json::from_slice(line).unwrap_or_default();
        let Some(path) = message["executable"].as_str() else { continue };
        let is_test = message["profile"]["test"] == true;
        let name = &message["target"]["name"];
        if !is_test && name == COMMAND {
            programs.push((path.trim_start_matches('/').to_owned(), path.into()));
        }
        let package = package_name(message["package_id"].as_str().unwrap_or_default());
        let test = tests.iter().find(|(of, file, _)| *of == package && name == file);
        if let (true, Some((package, file, _))) = (is_test, test) {
            programs.push((guest_path(package, file), path.into()));
        }
    }
    Ok(programs)
}

/// The name in a package identifier of cargo: "path+file:///folder/NAME#version", or
/// "path+file:///folder#NAME@version" where the folder has another name.
fn package_name(identifier: &str) -> &str {
    let (path, version) = identifier.rsplit_once('#').unwrap_or((identifier, ""));
    match version.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or_default(),
    }
}

/// Path of a test binary in the guest.
fn guest_path(package: &str, file: &str) -> String {
    format!("tests/{package}/{file}")
}
