//! How `haul push` and `haul pull` start the other end: a copy of this program on a host that lacks
//! haul, and keys that are restricted to a directory.

mod common {
    pub mod command;
    pub mod program;
    pub mod running;
    pub mod ssh_server;
}

use common::command::{haul, run};
use common::ssh_server::SshServer;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Another host, which is this one with another home directory and another PATH.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { folder: tempfile::tempdir().unwrap() };
        let [home, programs] = ["home", "programs"].map(|name| {
            fs::create_dir(host.path(name)).unwrap();
            host.path(name).display().to_string()
        });
        let shell = format!(
            "shift; unset XDG_CACHE_HOME; export HOME={home} PATH={programs}:/usr/bin:/bin\n\
             cd {home} && exec \"$@\"\n"
        );
        fs::write(host.path("shell"), shell).unwrap();
        fs::write(host.path("file"), "content").unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Installs a program, as a script of sh.
    fn install(&self, name: &str, script: &str) {
        let path = self.path("programs").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Pushes a file to the home directory.
    fn push(&self, arguments: &[&str]) -> (i32, String) {
        let mut command = haul(&["push", "-e"]);
        command.arg(format!("sh {}", self.path("shell").display())).args(arguments);
        let (output, transcript) = run(command.arg(self.path("file")).arg("x:"));
        (output.status.code().unwrap(), transcript)
    }

    /// The programs that were copied there.
    fn brought(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.path("home/.cache/haul")) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

const COPIED: &str = "this program was copied there";

#[test]
fn a_host_without_haul_gets_this_program_once() {
    let host = Host::new();
    let (code, transcript) = host.push(&["--no-bring"]);
    assert_eq!(code, 12, "{transcript}");
    assert!(transcript.contains("haul is not installed there"), "{transcript}");
    // The second time, the copy is there.
    for is_first in [true, false] {
        let (code, transcript) = host.push(&["-I"]);
        assert_eq!(code, 0, "{transcript}");
        assert_eq!(transcript.contains(COPIED), is_first, "{transcript}");
    }
    assert_eq!(fs::read(host.path("home/file")).unwrap(), b"content");
    let [copy] = &host.brought()[..] else { panic!("{:?}", host.brought()) };
    assert_eq!(fs::read(copy).unwrap(), fs::read(env!("CARGO_BIN_EXE_haul")).unwrap());
    assert_eq!(fs::metadata(copy).unwrap().permissions().mode() & 0o7777, 0o700);
}

/// Some hosts have bash as sh, which reads a script from a pipe byte by byte.
#[test]
fn another_shell_reads_the_script_too() {
    for shell in ["/usr/bin/bash", "/usr/bin/dash"] {
        // Debian always has both.
        assert!(Path::new(shell).exists(), "{shell} is missing");
        let host = Host::new();
        symlink(shell, host.path("programs/sh")).unwrap();
        for is_first in [true, false] {
            let (code, transcript) = host.push(&["-I"]);
            assert_eq!(code, 0, "{shell}: {transcript}");
            assert_eq!(transcript.contains(COPIED), is_first, "{shell}: {transcript}");
        }
        assert_eq!(fs::read(host.path("home/file")).unwrap(), b"content");
    }
}

/// The umask of the script must not become the umask of the transfer, and an empty copy, as after a
/// power failure, must not be started.
#[test]
fn a_first_transfer_is_like_later_ones() {
    let host = Host::new();
    fs::create_dir_all(host.path("home/.cache/haul")).unwrap();
    let (code, transcript) = host.push(&["-rt"]);
    assert!(code == 0 && transcript.contains(COPIED), "{transcript}");
    let mode = || fs::metadata(host.path("home/file")).unwrap().permissions().mode();
    let first = mode();
    fs::remove_file(host.path("home/file")).unwrap();
    for copy in host.brought() {
        fs::write(copy, "").unwrap();
    }
    let (code, transcript) = host.push(&["-rt"]);
    assert!(code == 0 && transcript.contains(COPIED), "{transcript}");
    fs::remove_file(host.path("home/file")).unwrap();
    let (code, transcript) = host.push(&["-rt"]);
    assert!(code == 0 && !transcript.contains(COPIED), "{transcript}");
    assert_eq!(mode(), first);
    assert_eq!(host.brought().len(), 1);
}

#[test]
fn the_haul_of_the_host_is_used_if_it_speaks_this_version() {
    let host = Host::new();
    host.install("haul", "echo \"error: unexpected argument\" >&2; exit 2");
    let (code, transcript) = host.push(&[]);
    assert!(code == 0 && transcript.contains(COPIED), "{transcript}");
    assert!(!transcript.contains("unexpected argument"), "{transcript}");

    let host = Host::new();
    symlink(env!("CARGO_BIN_EXE_haul"), host.path("programs/haul")).unwrap();
    let (code, transcript) = host.push(&[]);
    assert!(code == 0 && !transcript.contains(COPIED), "{transcript}");
    assert!(host.brought().is_empty());
}

#[test]
fn a_host_that_cannot_run_this_program_is_one_line() {
    let host = Host::new();
    host.install("uname", "case $1 in -s) echo Linux;; *) echo riscv64;; esac");
    let (code, transcript) = host.push(&[]);
    assert_eq!(code, 12, "{transcript}");
    assert!(transcript.contains("and not on Linux riscv64"), "{transcript}");
    assert!(host.brought().is_empty());

    // The cache directory cannot be made.
    let host = Host::new();
    fs::write(host.path("home/.cache"), "").unwrap();
    let (code, transcript) = host.push(&[]);
    assert_eq!(code, 12, "{transcript}");
    assert!(transcript.contains("haul cannot be started there"), "{transcript}");
}

/// Runs `haul push` or `haul pull`. Returns the exit code and what was printed.
type Transfer = Box<dyn Fn(&[&str]) -> (i32, String)>;

/// An sshd whose only key runs `haul receive` with these arguments.
fn restricted(arguments: &str) -> Option<(SshServer, Transfer)> {
    let ssh = SshServer::start()?;
    let key = ssh.folder.path().join("user.pub");
    let public_key = fs::read_to_string(&key).unwrap();
    let folder = ssh.folder.path().join("only");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("existing"), "existing").unwrap();
    let command =
        format!("{} receive --only {} {arguments}", env!("CARGO_BIN_EXE_haul"), folder.display());
    fs::write(&key, format!("restrict,command=\"{command}\" {public_key}")).unwrap();
    let shell = ssh.client(ssh.port).join(" ");
    let transfer = move |arguments: &[&str]| {
        let mut command = haul(&arguments[..1]);
        let (output, transcript) = run(command.args(["-e", &shell]).args(&arguments[1..]));
        (output.status.code().unwrap(), transcript)
    };
    Some((ssh, Box::new(transfer)))
}

fn write(folder: &Path, name: &str, content: &str) -> String {
    fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
    fs::write(folder.join(name), content).unwrap();
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_restricted_key_stays_in_its_directory() {
    let Some((ssh, transfer)) = restricted("") else { return };
    let (root, only) = (ssh.folder.path(), ssh.folder.path().join("only"));
    let secret = write(root, "secret", "secret");
    write(root, "tree/sub/file", "file");
    symlink("..", only.join("out")).unwrap();
    let tree = root.join("tree");
    // A path that begins with a slash begins at the directory.
    let (code, transcript) = transfer(&["push", tree.to_str().unwrap(), "127.0.0.1:/"]);
    assert_eq!(code, 0, "{transcript}");
    assert!(!transcript.contains(COPIED), "{transcript}");
    assert_eq!(fs::read(only.join("tree/sub/file")).unwrap(), b"file");
    let back = root.join("back");
    let (code, transcript) = transfer(&["pull", "127.0.0.1:/tree/", back.to_str().unwrap()]);
    assert!(code == 0 && back.join("sub/file").is_file(), "{transcript}");
    for source in ["127.0.0.1:../secret", "127.0.0.1:out/secret", &format!("127.0.0.1:{secret}")] {
        let (code, transcript) = transfer(&["pull", source, back.to_str().unwrap()]);
        assert!(code == 12 || code == 23, "{transcript}");
        assert!(!back.join("secret").exists(), "{transcript}");
    }
    let (code, transcript) = transfer(&["push", &secret, "127.0.0.1:out/escaped"]);
    assert_eq!(code, 11, "{transcript}");
    assert!(!root.join("escaped").exists());
    // What lies outside cannot even be looked at.
    symlink("/", only.join("root")).unwrap();
    for source in ["127.0.0.1:root/etc/passwd", "127.0.0.1:root/etc/"] {
        let (code, transcript) = transfer(&["pull", "-vn", source, back.to_str().unwrap()]);
        assert_eq!(code, 23, "{transcript}");
        assert!(transcript.contains("0 files (0 B) would be sent"), "{transcript}");
    }
    let kept = ["pull", "-vnR", "127.0.0.1:root/etc/passwd", back.to_str().unwrap()];
    let (code, transcript) = transfer(&kept);
    assert!(code == 23 && transcript.contains("0 entries"), "{transcript}");
    let (code, transcript) = transfer(&["pull", "-nL", "127.0.0.1:root", back.to_str().unwrap()]);
    assert!(code == 23 && transcript.contains("0 entries"), "{transcript}");
    let link_dest = ["push", "--link-dest=../..", &secret, "127.0.0.1:tree"];
    let (code, transcript) = transfer(&link_dest);
    assert!(code == 12 && transcript.contains("earlier copy outside"), "{transcript}");
}

#[test]
fn a_key_that_may_read_writes_nothing() {
    let Some((ssh, transfer)) = restricted("--read-only") else { return };
    let root = ssh.folder.path();
    let file = write(root, "file", "file");
    let (code, transcript) = transfer(&["push", &file, "127.0.0.1:"]);
    assert_eq!(code, 12, "{transcript}");
    assert!(transcript.contains("this key may only read"), "{transcript}");
    let back = root.join("back");
    let (code, transcript) = transfer(&["pull", "127.0.0.1:existing", back.to_str().unwrap()]);
    assert_eq!((code, fs::read_to_string(back).unwrap()), (0, "existing".into()), "{transcript}");
}

#[test]
fn a_key_that_may_append_changes_nothing() {
    let Some((ssh, transfer)) = restricted("--append-only") else { return };
    let (root, only) = (ssh.folder.path(), ssh.folder.path().join("only"));
    let mode = fs::Permissions::from_mode(0o750);
    fs::create_dir(only.join("sub")).unwrap();
    fs::set_permissions(only.join("sub"), mode).unwrap();
    let tree = root.join("tree");
    write(&tree, "existing", "other");
    write(&tree, "new", "new");
    write(&tree, "sub/new", "new");
    write(&tree, ".x.haul-part", "part");
    fs::set_permissions(tree.join("sub"), fs::Permissions::from_mode(0o700)).unwrap();
    let source = format!("{}/", tree.display());
    let (code, transcript) = transfer(&["push", "-I", &source, "127.0.0.1:"]);
    assert_eq!(code, 23, "{transcript}");
    let differs = "existing: it differs, and this key may only add files";
    assert!(transcript.contains(differs), "{transcript}");
    assert!(transcript.contains(".x.haul-part: Operation not permitted"), "{transcript}");
    assert_eq!(fs::read_to_string(only.join("existing")).unwrap(), "existing");
    assert_eq!(fs::read_to_string(only.join("new")).unwrap(), "new");
    assert_eq!(fs::read_to_string(only.join("sub/new")).unwrap(), "new");
    assert_eq!(fs::metadata(only.join("sub")).unwrap().permissions().mode() & 0o777, 0o750);
    let (code, transcript) = transfer(&["push", "--delete=all", &source, "127.0.0.1:"]);
    assert!(code == 12 && transcript.contains("may not delete"), "{transcript}");
    let back = root.join("back");
    let (code, transcript) = transfer(&["pull", "127.0.0.1:existing", back.to_str().unwrap()]);
    assert!(code == 12 && transcript.contains("may only add files"), "{transcript}");
}
