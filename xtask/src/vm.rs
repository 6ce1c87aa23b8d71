//! `cargo xtask vm`: the library on a kernel and a device of its own.
//!
//! On veth `MSG_ZEROCOPY` always copies, and this machine's kernel may lack kTLS and netem. So a guest is booted:
//! Debian's kernel under software emulation, with a network card (virtio-net on a tap) that gathers pages, and
//! this very program as its first process. It lends towards the host and says what became of each loan. Times
//! mean nothing there; what happened does.
//!
//! What it needs, `ci/install` installs: qemu-system-x86, and Debian's kernel unpacked (not installed) in
//! [`kernel_folder`]. The tap is made in a network namespace of its own, so nothing of the host's is touched.

mod archive;
mod guest;
mod peer;

pub use guest::run_if_first_process;

use archive::Archive;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The host's and the guest's address on the tap.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const TAP: &str = "tap0";
/// How long everything may take: booting takes some ten seconds under emulation.
const TIME_MAX: Duration = Duration::from_secs(300);
/// How the guest ends its report.
const PASSED: &str = "haul guest: passed";
const FAILED: &str = "haul guest: FAILED";
/// What the guest's kernel loads, with what each stands on: the network card, then what is to be tested.
const MODULES: [&str; 12] = [
    "virtio_pci",
    "virtio_net",
    "veth",
    "tls",
    "gcm",
    "ctr",
    "ghash_generic",
    "chacha20poly1305",
    "chacha_generic",
    "poly1305_generic",
    "sch_netem",
    "sch_fq",
];
/// Where the guest finds their names, in the order of loading.
const MODULES_IN_ORDER: &str = "modules/in-order";
/// Programs that the guest runs.
const PROGRAMS: [(&str, &str); 4] =
    [("ip", "iproute2"), ("tc", "iproute2"), ("curl", "curl"), ("openssl", "openssl")];
/// The project's own tests that run in the guest: the package, the test's file, and which of its tests; all where that is empty.
const TESTS: [(&str, &str, &str); 6] = [
    ("haul", "paths", ""),
    ("haul", "loans", ""),
    ("haul", "receiving", ""),
    ("haul", "forwarding", ""),
    ("haul-sys", "haul_sys", "ktls::"),
    ("haul-serve", "serve", "tls::"),
];

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// Something that `ci/install` installs is missing.
    #[error("{0} is missing: run ci/install as root")]
    Missing(String),
    /// A step failed.
    #[error("{step}: {source}")]
    Step {
        /// What was being done.
        step: String,
        /// What went wrong.
        source: io::Error,
    },
    /// The guest found something wrong, or ended early.
    #[error("{0}")]
    Guest(String),
}

fn step(step: impl Into<String>) -> impl FnOnce(io::Error) -> VmError {
    move |source| VmError::Step { step: step.into(), source }
}

/// Where `ci/install` unpacks Debian's kernel.
fn kernel_folder() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    cache.unwrap_or_else(home).join("haul-vm")
}

/// Boots the guest and passes on what it says.
pub fn run() -> Result<(), VmError> {
    let folder = tempfile::tempdir().map_err(step("making a folder"))?;
    let initramfs = folder.path().join("initramfs");
    fs::write(&initramfs, build_initramfs()?).map_err(step("writing the initramfs"))?;
    haul_lab::become_lab_user()
        .map_err(|error| step("making a namespace")(io::Error::other(error)))?;
    // A thread of its own: what it does to its namespace concerns nobody else.
    thread::scope(|scope| {
        let guest = scope.spawn(|| boot(&initramfs));
        guest.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn boot(initramfs: &Path) -> Result<(), VmError> {
    haul_sys::namespace::unshare_network().map_err(step("making a network namespace"))?;
    let peer = peer::serve().map_err(step("serving the guest"))?;
    let kernel = find(&kernel_folder().join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-machine", "q35,accel=tcg", "-cpu", "max", "-m", "1024", "-smp", "2"])
        .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"])
        .args(["-netdev", &format!("tap,id=net0,ifname={TAP},script=no,downscript=no")])
        .args(["-device", "virtio-net-pci,netdev=net0,romfile="])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", &format!("console=ttyS0 quiet panic=-1 {}={}", guest::PEER, peer)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut qemu =
        haul_sys::child::dies_with_parent(&mut qemu).spawn().map_err(|error| {
            match error.kind() {
                io::ErrorKind::NotFound => VmError::Missing("qemu-system-x86_64".into()),
                _ => step("starting qemu")(error),
            }
        })?;
    let heard = configure_tap().and_then(|()| listen(&mut qemu));
    // It has said all it had to say.
    let _ = qemu.kill();
    let _ = qemu.wait();
    heard
}

/// Waits until qemu has made the tap, and gives the host its end of it.
fn configure_tap() -> Result<(), VmError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let address = format!("{HOST}/24");
    while !ip(&["link", "set", TAP, "up"])? {
        if Instant::now() >= deadline {
            return Err(VmError::Guest(
                "qemu made no tap: is /dev/net/tun there, and allowed?".into(),
            ));
        }
        thread::sleep(Duration::from_millis(50));
    }
    if !ip(&["address", "add", &address, "dev", TAP])? {
        return Err(VmError::Guest(format!("the tap did not take the address {address}")));
    }
    Ok(())
}

/// Runs `ip`; whether it succeeded.
fn ip(arguments: &[&str]) -> Result<bool, VmError> {
    let status = Command::new("ip").args(arguments).stderr(Stdio::null()).status();
    status.map(|status| status.success()).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => VmError::Missing("ip (iproute2)".into()),
        _ => step("running ip")(error),
    })
}

/// Passes on what the guest says until it is done.
fn listen(qemu: &mut Child) -> Result<(), VmError> {
    let output = qemu.stdout.take().ok_or_else(|| VmError::Guest("qemu has no output".into()))?;
    let (lines_out, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if lines_out.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    let deadline = Instant::now() + TIME_MAX;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                println!("{line}");
                if line.contains(PASSED) {
                    return Ok(());
                }
                if let Some((_, why)) = line.split_once(FAILED) {
                    return Err(VmError::Guest(format!("the guest failed{why}")));
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(VmError::Guest(format!("the guest was not done after {TIME_MAX:?}")));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(VmError::Guest("the guest ended without a result".into()));
            }
        }
    }
}

/// This program as the first process, the tests, and everything they need.
fn build_initramfs() -> Result<Vec<u8>, VmError> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "tmp", "modules", "tests"] {
        archive.folder(folder);
    }
    let this = std::env::current_exe().map_err(step("finding this program"))?;
    archive.program(&this, "init")?;
    for (name, package) in PROGRAMS {
        let program = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
            .map(|folder| Path::new(folder).join(name))
            .into_iter()
            .find(|path| path.exists())
            .ok_or_else(|| VmError::Missing(format!("{name} ({package})")))?;
        archive.program(&program, &format!("bin/{name}"))?;
    }
    for (name, path) in build_tests()? {
        archive.program(&path, &format!("tests/{name}"))?;
    }
    let mut in_order = Vec::new();
    for name in MODULES {
        add_module(&mut archive, name, &mut in_order)?;
    }
    archive.content(MODULES_IN_ORDER, in_order.join("\n").as_bytes());
    Ok(archive.finish())
}

/// A module, after those that it names as what it stands on.
fn add_module(
    archive: &mut Archive,
    name: &str,
    in_order: &mut Vec<String>,
) -> Result<(), VmError> {
    const STANDS_ON: &[u8] = b"\0depends=";
    if in_order.iter().any(|other| other == name) {
        return Ok(());
    }
    let tree = kernel_folder().join("lib/modules");
    // A module's file may be spelt with either.
    let path = find(&tree, |file| {
        file.strip_suffix(".ko").is_some_and(|stem| stem.replace('-', "_") == name)
    })?;
    let content = fs::read(&path).map_err(step(format!("reading {}", path.display())))?;
    let at = content.windows(STANDS_ON.len()).position(|window| window == STANDS_ON);
    let names = at.map_or(&[][..], |at| &content[at + STANDS_ON.len()..]);
    let names = names.split(|&byte| byte == 0).next().unwrap_or_default();
    for below in String::from_utf8_lossy(names).split(',').filter(|below| !below.is_empty()) {
        add_module(archive, &below.replace('-', "_"), in_order)?;
    }
    archive.content(&format!("modules/{name}.ko"), &content);
    in_order.push(name.into());
    Ok(())
}

/// Builds the library's tests; their names and where they are.
fn build_tests() -> Result<Vec<(String, PathBuf)>, VmError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["test", "--release", "--locked", "--no-run", "--message-format", "json"]);
    // A package's own tests go by its name.
    build.arg("--lib");
    for (package, file, _) in TESTS {
        build.args(["--package", package]);
        if file != package.replace('-', "_") {
            build.args(["--test", file]);
        }
    }
    let output = build.stderr(Stdio::inherit()).output().map_err(step("running cargo"))?;
    if !output.status.success() {
        return Err(VmError::Guest("the library's tests do not build".into()));
    }
    let mut tests = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n') {
        let message: serde_json::Value = serde_json::from_slice(line).unwrap_or_default();
        let is_test = message["profile"]["test"] == true;
        let name = message["target"]["name"]
            .as_str()
            .filter(|name| is_test && TESTS.iter().any(|(_, file, _)| file == name));
        if let (Some(name), Some(path)) = (name, message["executable"].as_str()) {
            tests.push((name.to_owned(), path.into()));
        }
    }
    Ok(tests)
}

/// The first file in a tree whose name is right.
fn find(folder: &Path, is_it: impl Fn(&str) -> bool + Copy) -> Result<PathBuf, VmError> {
    fn search(folder: &Path, is_it: impl Fn(&str) -> bool + Copy) -> Option<PathBuf> {
        let entries = fs::read_dir(folder).ok()?.flatten();
        for path in entries.map(|entry| entry.path()) {
            let is_named = path.file_name().and_then(|name| name.to_str()).is_some_and(is_it);
            if path.is_dir() && !path.is_symlink() {
                if let Some(found) = search(&path, is_it) {
                    return Some(found);
                }
            } else if is_named {
                return Some(path);
            }
        }
        None
    }
    search(folder, is_it).ok_or_else(|| {
        VmError::Missing(format!("a file of Debian's kernel in {}", folder.display()))
    })
}
