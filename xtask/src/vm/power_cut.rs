//! `cargo xtask power-cuts`: switches the guest off while haul pushes files to its disk, and
//! compares what the disk has afterwards.
//!
//! The disk is a file of this machine, so it keeps what the guest's kernel wrote to it, and loses
//! what the guest's kernel held in memory. A drive that loses its own cache is not simulated.

use super::kernel::Kernel;
use super::{Accelerator, Content, GUEST, VmError, build_initramfs, configure_tap};
use super::{peer, qemu, start, step};
use rustix::mount::MountFlags;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The modules of a disk and its file system.
pub(super) const MODULES: [&str; 3] = ["virtio_blk", "crc32c_generic", "ext4"];
/// Where the guest mounts the disk. The folder exists only in this guest.
pub(super) const DISK_FOLDER: &str = "/disk";
/// The port at which the guest receives.
const PORT: u16 = 7000;
/// The line by which the guest tells that it receives.
const READY: &str = "haul guest: receives";
/// The time in which the guest starts.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// The time in which the guest acknowledges bytes, in ms.
const ACKNOWLEDGE_TIMEOUT_MS: u32 = 3000;
/// The earliest and the latest time of a power cut after the push began.
const CUT_MS: std::ops::Range<u64> = 300..9000;
/// The size of the disk.
const DISK_BYTES: u64 = 2 << 30;

/// Starts `haul receive` for each connection. Ends with the guest.
pub(super) fn receive() -> Result<(), VmError> {
    rustix::mount::mount("/dev/vda", DISK_FOLDER, "ext4", MountFlags::empty(), None)
        .map_err(|errno| step("mounting the disk")(errno.into()))?;
    let listener = TcpListener::bind((GUEST, PORT)).map_err(step("listening"))?;
    println!("{READY}");
    for connection in listener.incoming() {
        let connection = OwnedFd::from(connection.map_err(step("accepting"))?);
        let output = connection.try_clone().map_err(step("copying a descriptor"))?;
        let mut haul = Command::new("/bin/haul");
        haul.arg("receive").stdin(Stdio::from(connection)).stdout(Stdio::from(output));
        haul.spawn().map_err(step("starting haul"))?;
    }
    Ok(())
}

/// Connects standard input and output with the guest: the command that haul starts in place of ssh.
pub fn connect() -> Result<(), VmError> {
    let socket = TcpStream::connect((GUEST, PORT)).map_err(step("connecting to the guest"))?;
    // A guest that is off does not answer.
    rustix::net::sockopt::set_tcp_user_timeout(&socket, ACKNOWLEDGE_TIMEOUT_MS)
        .map_err(|errno| step("connecting to the guest")(errno.into()))?;
    let mut input = socket.try_clone().map_err(step("copying a descriptor"))?;
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut input);
        let _ = input.shutdown(std::net::Shutdown::Write);
    });
    let (mut socket, mut output) = (socket, io::stdout().lock());
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = socket.read(&mut buffer).map_err(step("reading from the guest"))?;
        if count == 0 {
            return Ok(());
        }
        output
            .write_all(&buffer[..count])
            .and_then(|()| output.flush())
            .map_err(step("writing"))?;
    }
}

/// Switches the guest off so often, with these options of `haul push`.
pub fn run(rounds: u32, options: &[String]) -> Result<(), VmError> {
    let kernel = Kernel::select(None)?;
    let folder = tempfile::tempdir().map_err(step("making a folder"))?;
    let path = |name: &str| folder.path().join(name);
    let initramfs = path("initramfs");
    fs::write(&initramfs, build_initramfs(Content::Disk, &kernel)?)
        .map_err(step("writing the initramfs"))?;
    let source = path("source");
    write_source(&source).map_err(step("writing the source"))?;
    let disk = path("disk");
    let file = fs::File::create(&disk).map_err(step("making a disk"))?;
    file.set_len(DISK_BYTES).map_err(step("making a disk"))?;
    call(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk))?;
    let cuts = Cuts { kernel, initramfs, source, disk, mount: path("mount"), options };
    fs::create_dir(&cuts.mount).map_err(step("making a folder"))?;
    // A separate thread, because it moves into a new network namespace.
    thread::scope(|scope| {
        let work = scope.spawn(|| cuts.run(rounds));
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

struct Cuts<'a> {
    kernel: Kernel,
    initramfs: PathBuf,
    source: PathBuf,
    disk: PathBuf,
    mount: PathBuf,
    options: &'a [String],
}

impl Cuts<'_> {
    fn run(&self, rounds: u32) -> Result<(), VmError> {
        haul_lab_sys::namespace::unshare_network().map_err(step("making a network namespace"))?;
        let mut random = fastrand::Rng::new();
        let mut differences = 0;
        for round in 1..=rounds {
            let cut = Duration::from_millis(random.u64(CUT_MS));
            let mut guest = self.boot()?;
            let mut push = self.push()?;
            let begun = Instant::now();
            let mut ended = None;
            while begun.elapsed() < cut && ended.is_none() {
                ended = push.try_wait().map_err(step("waiting for haul"))?;
                thread::sleep(Duration::from_millis(10));
            }
            // At once, as by the loss of power.
            let _ = guest.kill();
            let _ = guest.wait();
            let status = push.wait().map_err(step("waiting for haul"))?;
            let (whole, different) = self.compare(status.success())?;
            differences += different;
            println!(
                "power cut {round} after {:.1} s: haul ended with {status}; {whole} whole files, \
                 {different} differ",
                begun.elapsed().as_secs_f64()
            );
        }
        let mut guest = self.boot()?;
        let status = self.push()?.wait().map_err(step("waiting for haul"))?;
        // The disk has everything after an orderly end of haul, and the guest still runs.
        let _ = guest.kill();
        let _ = guest.wait();
        let (whole, different) = self.compare(true)?;
        println!("without a power cut: {status}; {whole} whole files, {different} differ");
        if differences + different > 0 || !status.success() {
            return Err(VmError::Guest("visible files differ".into()));
        }
        Ok(())
    }

    /// Boots the guest, and waits until it receives.
    fn boot(&self) -> Result<Child, VmError> {
        let port = peer::serve().map_err(step("serving the guest"))?;
        let mut qemu = qemu(&self.kernel, &self.initramfs, port, Accelerator::Tcg);
        qemu.arg("-drive").arg(format!("file={},format=raw,if=virtio", self.disk.display()));
        let mut guest = start(qemu.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        configure_tap()?;
        let output = guest.stdout.take().ok_or_else(|| VmError::Guest("no output".into()))?;
        let (ready_tx, ready_rx) = std::sync::mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if line.contains(READY) {
                    let _ = ready_tx.send(());
                } else if !line.trim().is_empty() {
                    println!("{}", line.trim_end());
                }
            }
        });
        if ready_rx.recv_timeout(BOOT_TIMEOUT).is_ok() {
            return Ok(guest);
        }
        let _ = guest.kill();
        Err(VmError::Guest("the guest does not receive".into()))
    }

    fn push(&self) -> Result<Child, VmError> {
        let program = std::env::current_exe().map_err(step("finding this program"))?;
        let haul = super::static_build::host_triple().map_err(VmError::Guest)?;
        let haul = super::static_build::binary(super::COMMAND, &haul);
        let mut push = Command::new(haul);
        push.args(["push", "-a", "--streams=0", "--no-bring"]).args(self.options);
        push.arg("-e").arg(format!("{} connect-guest", program.display()));
        push.arg(format!("{}/", self.source.display())).arg(format!("x:{DISK_FOLDER}/copy"));
        haul_lab_sys::child::dies_with_parent(&mut push).spawn().map_err(step("starting haul"))
    }

    /// Compares the visible files of the disk with the source. Returns how many are whole, and how
    /// many differ. If the copy is complete, it is removed, so that the next push begins anew.
    fn compare(&self, is_complete: bool) -> Result<(u64, u64), VmError> {
        call(Command::new("mount").args(["-o", "loop"]).arg(&self.disk).arg(&self.mount))?;
        let compared = self.compare_mounted().map_err(step("comparing"));
        if is_complete {
            fs::remove_dir_all(self.mount.join("copy")).map_err(step("removing the copy"))?;
        }
        call(Command::new("umount").arg(&self.mount))?;
        compared
    }

    fn compare_mounted(&self) -> io::Result<(u64, u64)> {
        let copy = self.mount.join("copy");
        let (mut whole, mut different) = (0, 0);
        for folder in ["", "small"] {
            let Ok(entries) = fs::read_dir(copy.join(folder)) else { continue };
            for entry in entries {
                let path = entry?.path();
                let is_part = path.to_string_lossy().contains(".haul-");
                if is_part || path.is_dir() {
                    continue;
                }
                let below = path.strip_prefix(&copy).map_err(io::Error::other)?;
                if fs::read(&path)? == fs::read(self.source.join(below))? {
                    whole += 1;
                } else {
                    different += 1;
                    println!("{} differs", below.display());
                }
            }
        }
        Ok((whole, different))
    }
}

/// Small files, and files large enough for a journal.
fn write_source(folder: &Path) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(3);
    fs::create_dir_all(folder.join("small"))?;
    for index in 0..3000 {
        let mut content = vec![0; random.usize(1..40_000)];
        random.fill(&mut content);
        fs::write(folder.join("small").join(index.to_string()), content)?;
    }
    for index in 0..12 {
        let mut content = vec![0; random.usize(1 << 20..40 << 20)];
        random.fill(&mut content);
        fs::write(folder.join(format!("large{index}")), content)?;
    }
    Ok(())
}

fn call(command: &mut Command) -> Result<(), VmError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().map_err(step(format!("running {name}")))?;
    if status.success() { Ok(()) } else { Err(VmError::Guest(format!("{name}: {status}"))) }
}
