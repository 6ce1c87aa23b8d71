//! `cargo xtask package`: a statically linked release binary, an archive of it, Debian packages of
//! the binary and of the C library, and a container file.
//!
//! The binary is linked with glibc's static libraries (`+crt-static`), so that it runs on any Linux
//! of its architecture. Limitation: names of peers are resolved by the host's `nsswitch` modules,
//! which a static glibc loads at run time if the host has the same glibc; otherwise only `files`
//! and `dns` work.

mod c_library;

use crate::static_build::{self, ROOT};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MAINTAINER: &str = "The haul developers <haul@localhost>";
/// The shells that have completions, and the file of each in a package.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/haul"),
    ("zsh", "usr/share/zsh/vendor-completions/_haul"),
    ("fish", "usr/share/fish/vendor_completions.d/haul.fish"),
];
/// The units, whose command is elsewhere in a package than after `cargo install`.
const UNITS: [&str; 3] = ["haul-serve.service", "haul-serve.socket", "haul-proxy.service"];

/// Builds the packages and writes them into `out`. Prints their paths.
pub fn run(out: &Path) -> Result<(), String> {
    let (triple, architecture) =
        (static_build::host_triple()?, output("dpkg", &["--print-architecture"])?);
    fs::create_dir_all(out).map_err(failed("creating", out))?;
    execute(static_build::cargo("build", &triple).args(["-p", "haul-cli"]))?;
    let binary = static_build::binary("haul", &triple);
    let version = haul_version::VERSION;
    let mut packages = c_library::build(out, version, &architecture)?;
    let stage = temporary_folder()?;
    stage_package(&binary, stage.path(), version, &architecture)?;
    packages.push(build_deb(stage.path(), out, "haul", version, &architecture)?);
    let archive = out.join(format!("haul-{version}-{triple}.tar.gz"));
    let folder = binary.parent().unwrap_or(Path::new("."));
    execute(
        Command::new("tar")
            .args(["--owner=0", "--group=0", "--mode=u+w,go=rX"])
            .arg(format!("--transform=s,^,haul-{version}/,"))
            .arg("-czf")
            .arg(&archive)
            .arg("-C")
            .arg(folder)
            .arg("haul")
            .arg("-C")
            .arg(fs::canonicalize(ROOT).map_err(failed("reading", Path::new(ROOT)))?)
            .args(["LICENSE-MIT", "LICENSE-APACHE", "README.md"]),
    )?;
    let container = out.join("container");
    fs::create_dir_all(&container).map_err(failed("creating", &container))?;
    copy(&binary, &container.join("haul"), 0o755)?;
    write(&container.join("Containerfile"), CONTAINER_FILE)?;
    packages.extend([archive, container.join("Containerfile")]);
    for path in packages {
        println!("{}", path.display());
    }
    Ok(())
}

/// Builds a Debian package from the folder of its files. Returns its path.
fn build_deb(
    root: &Path,
    out: &Path,
    name: &str,
    version: &str,
    architecture: &str,
) -> Result<PathBuf, String> {
    // The modes must not depend on the umask.
    execute(Command::new("chmod").args(["-R", "u=rwX,go=rX"]).arg(root))?;
    let deb = out.join(format!("{name}_{version}_{architecture}.deb"));
    let arguments: [&OsStr; 4] =
        ["--root-owner-group".as_ref(), "--build".as_ref(), root.as_ref(), deb.as_ref()];
    execute(Command::new("dpkg-deb").args(arguments))?;
    Ok(deb)
}

fn temporary_folder() -> Result<tempfile::TempDir, String> {
    tempfile::tempdir().map_err(|error| format!("a temporary folder: {error}"))
}

/// A container whose only file is the binary.
const CONTAINER_FILE: &str = "\
# podman build -t haul . && podman run --rm haul doctor
# A measurement needs namespaces and a folder for its files; the report is below the current one:
# podman run --rm --cap-add=SYS_ADMIN,NET_ADMIN --tmpfs /tmp -v \"$PWD:/work\" haul bench
FROM scratch
WORKDIR /work
COPY haul /haul
ENTRYPOINT [\"/haul\"]
";

/// Lays out the files of the package below `root`.
fn stage_package(
    binary: &Path,
    root: &Path,
    version: &str,
    architecture: &str,
) -> Result<(), String> {
    copy(binary, &root.join("usr/bin/haul"), 0o755)?;
    for (shell, path) in COMPLETIONS {
        let script = output(binary, &["completions", shell])?;
        write(&root.join(path), &(script + "\n"))?;
    }
    let manual = root.join("usr/share/man/man1");
    fs::create_dir_all(&manual).map_err(failed("creating", &manual))?;
    execute(Command::new(binary).arg("man").arg(&manual))?;
    let pages = fs::read_dir(&manual).map_err(failed("reading", &manual))?;
    let pages: Vec<PathBuf> = pages.flatten().map(|page| page.path()).collect();
    execute(Command::new("gzip").arg("-9n").args(&pages))?;
    for unit in UNITS {
        let source = Path::new(ROOT).join("docs/systemd").join(unit);
        let text = fs::read_to_string(&source).map_err(failed("reading", &source))?;
        let text = text.replace("/usr/local/bin/haul", "/usr/bin/haul");
        let text =
            text.replace("# Where the command lies: `cargo install` puts it elsewhere.\n", "");
        write(&root.join("usr/lib/systemd/system").join(unit), &text)?;
    }
    write_copyright(root, "haul")?;
    let kib = fs::metadata(binary).map_err(failed("reading", binary))?.len() / 1024;
    // The lines after the first of a description begin with a space.
    let control = format!(
        "Package: haul\nVersion: {version}\nArchitecture: {architecture}\nSection: net\n\
         Priority: optional\nInstalled-Size: {kib}\nRecommends: procps, systemd\n\
         Maintainer: {MAINTAINER}\n\
         Description: cheapest way to move bytes over TCP, and the proof of it\n\
         \x20Measures what each method of sending, receiving and forwarding costs on this\n\
         \x20machine, interrupts included, and serves files by the cheapest one.\n"
    );
    write(&root.join("DEBIAN/control"), &control)
}

/// Writes the file with the licences of a package.
fn write_copyright(root: &Path, name: &str) -> Result<(), String> {
    let licence = |name: &str| {
        let path = Path::new(ROOT).join(name);
        fs::read_to_string(&path).map_err(failed("reading", &path))
    };
    let copyright = format!(
        "haul is licensed under either of MIT or Apache-2.0, at your choice.\n\n{}\n{}",
        licence("LICENSE-MIT")?,
        licence("LICENSE-APACHE")?
    );
    write(&root.join("usr/share/doc").join(name).join("copyright"), &copyright)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed("creating", parent))?;
    }
    fs::write(path, text).map_err(failed("writing", path))
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), String> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(failed("creating", parent))?;
    }
    fs::copy(from, to).map_err(failed("copying", from))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).map_err(failed("writing", to))
}

fn failed<'a>(step: &'a str, path: &'a Path) -> impl Fn(io::Error) -> String + 'a {
    move |error| format!("{step} {}: {error}", path.display())
}

/// Runs a program to its end.
fn execute(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    let status = command.status().map_err(|error| format!("{name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name} failed: {status}")) }
}

/// The output of a program, without the newline at its end.
fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<String, String> {
    let name = program.as_ref().display().to_string();
    let output = Command::new(&program).args(arguments).output();
    let output = output.map_err(|error| format!("{name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name} failed: {}", output.status));
    }
    let text = String::from_utf8(output.stdout).map_err(|error| format!("{name}: {error}"))?;
    Ok(text.trim_end().to_owned())
}
