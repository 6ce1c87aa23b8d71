//! An ssh server of the present user.

use super::program::program;
use super::running::Running;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait for sshd.
const LIMIT: Duration = Duration::from_secs(60);

/// A running sshd. The folder holds the server's files, and the keys `host` and `user`.
pub struct SshServer {
    pub folder: TempDir,
    pub port: u16,
    ssh: PathBuf,
    _process: Running,
}

impl SshServer {
    /// Starts an ssh server; `None` if OpenSSH is missing.
    pub fn start() -> Option<Self> {
        let (sshd, ssh, keygen) = (program("sshd")?, program("ssh")?, program("ssh-keygen")?);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["host", "user"] {
            let mut command = Command::new(&keygen);
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path(name));
            assert!(command.status().unwrap().success());
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\n",
            path("host").display(),
            path("user.pub").display()
        );
        fs::write(path("config"), config).unwrap();
        if rustix::process::getuid().is_root() {
            // The start script of sshd creates the directory of its privilege separation.
            fs::create_dir_all("/run/sshd").unwrap();
        }
        let mut command = Command::new(&sshd);
        command.args(["-D", "-e", "-f"]).arg(path("config")).stderr(Stdio::null());
        let process = Running::start(&mut command);
        let deadline = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "sshd does not listen at port {port}");
            thread::sleep(Duration::from_millis(50));
        }
        Some(Self { folder, port, ssh, _process: process })
    }

    /// The words of the command `ssh` with its options, to a port: the server's or a proxy's.
    pub fn client(&self, port: u16) -> Vec<String> {
        let key = self.folder.path().join("user");
        let options = "-F none -o StrictHostKeyChecking=no -o BatchMode=yes -o LogLevel=ERROR \
                       -o UserKnownHostsFile=/dev/null";
        let mut words = vec![self.ssh.display().to_string()];
        words.extend(options.split_ascii_whitespace().map(str::to_owned));
        words.extend(["-i".into(), key.display().to_string(), "-p".into(), port.to_string()]);
        words
    }
}
