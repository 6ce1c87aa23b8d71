//! `haul push` and `haul pull` whose ends are killed.

mod common {
    pub mod command;
    pub mod program;
    pub mod running;
    pub mod ssh_server;
}

use common::command::{haul, run};
use common::ssh_server::SshServer;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for a part of a file.
const LIMIT: Duration = Duration::from_secs(60);

/// The size of the file in MiB. The acceptance of the transfer runs with 4096.
fn size_mib() -> u64 {
    std::env::var("HAUL_TEST_MIB").map_or(48, |text| text.parse().unwrap())
}

/// How often an end is killed.
fn kills() -> usize {
    std::env::var("HAUL_TEST_KILLS").map_or(4, |text| text.parse().unwrap())
}

fn write_random(path: &Path, random: &mut fastrand::Rng) {
    let mut file = File::create(path).unwrap();
    let mut part = vec![0; 1 << 20];
    for _ in 0..size_mib() {
        random.fill(&mut part);
        file.write_all(&part).unwrap();
    }
}

/// The bytes that are here of a file.
fn present(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

struct Hosts {
    ssh: SshServer,
    haul: PathBuf,
}

impl Hosts {
    /// `None` if OpenSSH is missing. The other end writes its number to a file.
    fn start() -> Option<Self> {
        let ssh = SshServer::start()?;
        let path = |name: &str| ssh.folder.path().join(name);
        for folder in ["source", "copy"] {
            fs::create_dir(path(folder)).unwrap();
        }
        let haul = path("haul");
        let pid = path("pid");
        let program = env!("CARGO_BIN_EXE_haul");
        // The file appears with its content.
        let script = format!(
            "#!/bin/sh\necho $$ >{0}.new\nmv {0}.new {0}\nexec {program} \"$@\"\n",
            pid.display()
        );
        fs::write(&haul, script).unwrap();
        fs::set_permissions(&haul, fs::Permissions::from_mode(0o755)).unwrap();
        Some(Self { ssh, haul })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ssh.folder.path().join(name)
    }

    fn command(&self, is_push: bool) -> Command {
        let [source, copy] = ["source/file", "copy"].map(|name| self.path(name));
        let mut command = haul(&[if is_push { "push" } else { "pull" }, "-t"]);
        command.args(["-e", &self.ssh.client(self.ssh.port).join(" "), "--remote-haul"]);
        command.arg(&self.haul);
        if is_push {
            command.arg(source).arg(format!("127.0.0.1:{}", copy.display()));
        } else {
            command.arg(format!("127.0.0.1:{}", source.display())).arg(copy);
        }
        command
    }

    /// Waits until so many bytes are here, and kills one end.
    fn kill(&self, mut process: Child, kills_other_end: bool, bytes: u64) {
        // Another process could have the number of an earlier run.
        let is_there = || !kills_other_end || self.path("pid").exists();
        let (part, copy) = (self.path("copy/.file.haul-part"), self.path("copy/file"));
        let deadline = Instant::now() + LIMIT;
        while (present(&part) < bytes && !copy.exists() || !is_there())
            && process.try_wait().unwrap().is_none()
        {
            assert!(Instant::now() < deadline, "{} bytes of {bytes} arrived", present(&part));
            thread::sleep(Duration::from_millis(1));
        }
        if process.try_wait().unwrap().is_some() {
            return;
        }
        let pid = if kills_other_end {
            let text = fs::read_to_string(self.path("pid")).unwrap();
            Pid::from_raw(text.trim().parse().unwrap()).unwrap()
        } else {
            Pid::from_child(&process)
        };
        // The transfer may be over.
        let _ = kill_process(pid, Signal::KILL);
        process.wait().unwrap();
    }
}

/// Each end is killed at random places of a file. Each time, what is there is not sent again.
#[test]
fn a_killed_transfer_goes_on_where_it_stopped() {
    let Some(hosts) = Hosts::start() else { return };
    let mut random = fastrand::Rng::with_seed(7);
    write_random(&hosts.path("source/file"), &mut random);
    let size = size_mib() << 20;
    for round in 0..kills() {
        let (is_push, kills_other_end) = (round % 2 == 0, round / 2 % 2 == 0);
        let _ = fs::remove_file(hosts.path("copy/file"));
        let mut least = 0;
        while !hosts.path("copy/file").exists() && least < size / 4 * 3 {
            least = random.u64(least..size) + (1 << 20);
            let _ = fs::remove_file(hosts.path("pid"));
            let mut command = hosts.command(is_push);
            // Without a terminal, haul prints nothing before its end.
            command.stdout(Stdio::null()).stderr(Stdio::null());
            hosts.kill(command.spawn().unwrap(), kills_other_end, least);
            thread::sleep(Duration::from_millis(random.u64(0..50)));
        }
        let was_there = present(&hosts.path("copy/.file.haul-part"));
        let (output, transcript) = run(&mut hosts.command(is_push));
        assert!(output.status.success(), "{transcript}");
        if was_there > 2 << 20 && !transcript.contains("up to date") {
            assert!(transcript.contains("were there from an interrupted"), "{transcript}");
        }
        let compared =
            Command::new("cmp").args([hosts.path("source/file"), hosts.path("copy/file")]).status();
        assert!(compared.unwrap().success(), "round {round}");
        let names = fs::read_dir(hosts.path("copy")).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"], "{transcript}");
    }
}
