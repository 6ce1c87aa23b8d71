//! The Debian packages of the C library: `libhaul0` for programs, and `libhaul-dev` for developers.

use super::{
    MAINTAINER, build_deb, execute, failed, output, temporary_folder, write, write_copyright,
};
use crate::static_build::ROOT;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package of the shared library, with the number of its soname.
const RUNTIME: &str = "libhaul0";
const DEVELOPMENT: &str = "libhaul-dev";

/// Builds both packages into `out`. Returns their paths.
pub fn build(out: &Path, version: &str, architecture: &str) -> Result<Vec<PathBuf>, String> {
    let triplet = output("dpkg-architecture", &["-qDEB_HOST_MULTIARCH"])?;
    let libraries = format!("lib/{triplet}");
    let development = temporary_folder()?;
    execute(
        Command::new(Path::new(ROOT).join("bindings/c/install"))
            .args(["--prefix", "/usr", "--libdir", &libraries, "--destdir"])
            .arg(development.path()),
    )?;
    let runtime = temporary_folder()?;
    let (from, to) = (
        development.path().join("usr").join(&libraries),
        runtime.path().join("usr").join(&libraries),
    );
    fs::create_dir_all(&to).map_err(failed("creating", &to))?;
    let shared = format!("libhaul.so.{version}");
    for name in ["libhaul.so.0", &shared] {
        fs::rename(from.join(name), to.join(name)).or_else(|_| {
            // The folders may be on different file systems.
            execute(Command::new("mv").arg(from.join(name)).arg(&to))
        })?;
    }
    let c_library = minimum_c_library(&to.join(&shared))?;
    write(&runtime.path().join("DEBIAN/shlibs"), &format!("libhaul 0 {RUNTIME} (>= {version})\n"))?;
    write(&runtime.path().join("DEBIAN/triggers"), "activate-noawait ldconfig\n")?;
    let package = |root: &Path, name: &str, section: &str, depends: &str, description: &str| {
        write_copyright(root, name)?;
        let control = format!(
            "Package: {name}\nSource: haul\nVersion: {version}\nArchitecture: {architecture}\n\
             Section: {section}\nPriority: optional\nMulti-Arch: same\nDepends: {depends}\n\
             Maintainer: {MAINTAINER}\nDescription: {description}\n\
             \x20Sends, receives and forwards bytes over TCP by the cheapest method that the\n\
             \x20kernel offers, for programs in C and C++.\n"
        );
        write(&root.join("DEBIAN/control"), &control)?;
        build_deb(root, out, name, version, architecture)
    };
    Ok(vec![
        package(
            runtime.path(),
            RUNTIME,
            "libs",
            &format!("libc6 (>= {c_library}), libgcc-s1"),
            "library that moves bytes over TCP (shared library)",
        )?,
        package(
            development.path(),
            DEVELOPMENT,
            "libdevel",
            &format!("{RUNTIME} (= {version})"),
            "library that moves bytes over TCP (development files)",
        )?,
    ])
}

/// The version of glibc that a library needs: the highest version of its undefined symbols.
fn minimum_c_library(library: &Path) -> Result<String, String> {
    let symbols = output("objdump", &["-T", &library.to_string_lossy()])?;
    let version_of = |word: &str| {
        let version = word.trim_matches(['(', ')']).strip_prefix("GLIBC_")?;
        let parts: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
        parts
    };
    let version = symbols.split_ascii_whitespace().filter_map(version_of).max();
    let version = version.ok_or_else(|| format!("{} does not need glibc", library.display()))?;
    Ok(version.iter().map(u32::to_string).collect::<Vec<_>>().join("."))
}
