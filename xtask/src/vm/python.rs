//! Python in the guest: `bytes` that Python lends are not copied.

use super::archive::Archive;
use super::{HOST, VmError, peer, step};
use crate::static_build::ROOT;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's Python, which `ci/install` installs.
const PYTHON: &str = "/usr/bin/python3";
const PROGRAM: &str = "bin/python3";
const SCRIPT: &str = "python/lend.py";
/// The bytes that the host expects, because Python in an emulated CPU would compute them slowly.
const STREAM: &str = "python/stream";
const STREAM_BYTES: u64 = (8 << 20) + (16 << 10);
/// The folders of Python's library that the script and the package import.
const FOLDERS: [&str; 5] = ["", "collections", "encodings", "importlib", "re"];

/// Adds Python, the package `haul_io` and the script to the initramfs.
pub(super) fn add_to(archive: &mut Archive) -> Result<(), VmError> {
    let executable =
        fs::canonicalize(PYTHON).map_err(|_| VmError::Missing(format!("{PYTHON} (python3)")))?;
    archive.add_program(&executable, PROGRAM)?;
    let library = library_folder()?;
    for folder in FOLDERS {
        add_sources(archive, &library.join(folder), &library.join(folder))?;
    }
    let extensions = library.join("lib-dynload");
    for path in entries(&extensions)? {
        archive.add_program(&path, guest_path(&path))?;
    }
    let package = library.join("haul_io");
    add_sources(archive, &Path::new(ROOT).join("bindings/python/haul_io"), &package)?;
    archive.add_program(&build_extension()?, guest_path(&package.join("_native.abi3.so")))?;
    archive.add_content(SCRIPT, include_bytes!("lend.py"));
    let stream: Vec<u8> = (0..STREAM_BYTES).map(peer::byte_at).collect();
    archive.add_content(STREAM, &stream);
    Ok(())
}

/// Runs the script, if the initramfs has Python.
pub(super) fn check(port: u16) -> Result<(), VmError> {
    let program = format!("/{PROGRAM}");
    if !fs::exists(&program).unwrap_or_default() {
        return Ok(());
    }
    let status = Command::new(program)
        // The folder above `lib/python3.*`. Without `site`, which this initramfs lacks parts of.
        .env("PYTHONHOME", "/usr")
        .args(["-S", &format!("/{SCRIPT}"), &HOST.to_string(), &port.to_string()])
        .arg(format!("/{STREAM}"))
        .status()
        .map_err(step("running Python"))?;
    // The initramfs is in memory, which the tests need.
    for path in ["/usr/lib", "/python"] {
        fs::remove_dir_all(path).map_err(step(format!("removing {path}")))?;
    }
    if status.success() { Ok(()) } else { Err(VmError::Guest("Python's loans failed".into())) }
}

/// The folder of Python's own modules.
fn library_folder() -> Result<PathBuf, VmError> {
    let script = "import sysconfig; print(sysconfig.get_path('stdlib'))";
    let output = Command::new(PYTHON).args(["-c", script]).output();
    let output = output.map_err(step("running Python"))?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// Adds the modules of a folder, without its subfolders.
fn add_sources(archive: &mut Archive, from: &Path, to: &Path) -> Result<(), VmError> {
    for path in entries(from)? {
        if path.extension().is_some_and(|extension| extension == "py") {
            let content = fs::read(&path).map_err(step(format!("reading {}", path.display())))?;
            let name = to.join(path.file_name().unwrap_or_default());
            archive.add_content(guest_path(&name), &content);
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, VmError> {
    let entries = fs::read_dir(folder).map_err(step(format!("reading {}", folder.display())))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// The path in the guest is the path on this machine.
fn guest_path(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

/// Builds the extension module, which Python loads, and returns its path.
fn build_extension() -> Result<PathBuf, VmError> {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(ROOT).args(["build", "--release", "--locked", "--package", "haul-python"]);
    build.args(["--message-format", "json", "--quiet"]);
    let output = build.output().map_err(step("running cargo"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut built = text.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let files = message["filenames"].as_array()?;
        let is_library = |path: &&str| path.ends_with("libhaul_io.so");
        files.iter().filter_map(|file| file.as_str()).find(is_library).map(PathBuf::from)
    });
    built.next_back().ok_or_else(|| VmError::Guest("building the Python bindings failed".into()))
}
