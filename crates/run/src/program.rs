//! Whether a program can load the interposer.

use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSection, elf};
use rustix::fs::{Mode, OFlags};
use rustix::process::{getegid, geteuid};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Scripts that a script names as its interpreter, one after the other, as the kernel limits them.
const INTERPRETERS_MAX: usize = 5;
/// Programs are read up to this length, which the tables at their beginning and end do not exceed
/// by far.
const PROGRAM_BYTES_MAX: u64 = 1 << 30;

/// Why a program does not load the interposer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The program does not name a dynamic linker.
    Static,
    /// The program does not name a dynamic linker, and was written in Go.
    StaticGo,
    /// A Go program makes system calls without the C library.
    Go,
    /// The set-user-ID or set-group-ID bit: the dynamic linker ignores the environment.
    SetUserId,
    /// File capabilities: the dynamic linker ignores the environment.
    Capabilities,
    /// A 32-bit program.
    ThirtyTwoBit,
    /// A program for another processor.
    OtherProcessor,
    /// The dynamic linker of another C library, such as musl.
    OtherLinker(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Static => "statically linked, so it loads no library",
            Self::StaticGo => "a Go program, which is statically linked and loads no library",
            Self::Go => "a Go program, which makes system calls without the C library",
            Self::SetUserId => {
                "set-user-ID or set-group-ID, so the dynamic linker ignores LD_PRELOAD"
            }
            Self::Capabilities => {
                "it has file capabilities, so the dynamic linker ignores LD_PRELOAD"
            }
            Self::ThirtyTwoBit => "a 32-bit program, and the library is a 64-bit one",
            Self::OtherProcessor => "compiled for another processor",
            Self::OtherLinker(linker) => {
                return write!(formatter, "loaded by {linker}, and the library needs glibc");
            }
        };
        formatter.write_str(text)
    }
}

/// The path of a program as `execvp` finds it: in the directories of `PATH`, unless the name has a
/// slash. `None` if there is none.
pub fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into()).filter(|path: &PathBuf| path.exists());
    }
    let is_program = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let directories = env::var_os("PATH")?;
    env::split_paths(&directories).map(|directory| directory.join(program)).find(is_program)
}

/// Why a program does not load the interposer; `None` if it does. Of a script the interpreter
/// counts.
///
/// Errors: the program cannot be read.
pub fn obstacle(path: &Path) -> io::Result<Option<Obstacle>> {
    let mut path = path.to_owned();
    for _ in 0..INTERPRETERS_MAX {
        let program = read(&path)?;
        if let Some(interpreter) = interpreter(&program) {
            path = PathBuf::from(interpreter);
            continue;
        }
        return Ok(privileged(&path)?.or_else(|| unloadable(&program)));
    }
    Ok(None)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A named pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut program = Vec::new();
    file.take(PROGRAM_BYTES_MAX).read_to_end(&mut program)?;
    Ok(program)
}

/// The interpreter in the first line of a script.
fn interpreter(program: &[u8]) -> Option<OsString> {
    let line = program.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
    let first = words.next()?;
    // `env` runs the program that it names.
    if first.ends_with(b"/env") {
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return find(OsStr::from_bytes(name)).map(PathBuf::into_os_string);
    }
    Some(OsString::from_vec(first.to_vec()))
}

/// Whether the kernel gives the program privileges that this process does not have.
fn privileged(path: &Path) -> io::Result<Option<Obstacle>> {
    /// The bits of a file's mode.
    const SET_USER_ID: u32 = 0o4000;
    const SET_GROUP_ID: u32 = 0o2000;
    let found = fs::metadata(path)?;
    let changes_user = found.mode() & SET_USER_ID != 0 && found.uid() != geteuid().as_raw();
    let changes_group = found.mode() & SET_GROUP_ID != 0 && found.gid() != getegid().as_raw();
    if changes_user || changes_group {
        return Ok(Some(Obstacle::SetUserId));
    }
    let has_capabilities =
        rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]).is_ok();
    // Root has all capabilities already, so a file adds none.
    Ok((has_capabilities && !geteuid().is_root()).then_some(Obstacle::Capabilities))
}

/// Why the dynamic linker cannot load the interposer into an ELF program. `None` also for a file
/// that is not one: starting it fails by itself.
fn unloadable(program: &[u8]) -> Option<Obstacle> {
    let file = match object::FileKind::parse(program).ok()? {
        object::FileKind::Elf64 => object::File::parse(program).ok()?,
        object::FileKind::Elf32 => return Some(Obstacle::ThirtyTwoBit),
        _ => return None,
    };
    let own = if cfg!(target_arch = "aarch64") {
        object::Architecture::Aarch64
    } else {
        object::Architecture::X86_64
    };
    if file.architecture() != own {
        return Some(Obstacle::OtherProcessor);
    }
    let is_go = file
        .sections()
        .any(|section| matches!(section.name(), Ok(".go.buildinfo" | ".note.go.buildid")));
    match linker(program) {
        None if is_go => Some(Obstacle::StaticGo),
        None => Some(Obstacle::Static),
        Some(_) if is_go => Some(Obstacle::Go),
        Some(linker) if !linker.contains("ld-linux") => Some(Obstacle::OtherLinker(linker)),
        Some(_) => None,
    }
}

/// The dynamic linker that a program names (`PT_INTERP`).
fn linker(program: &[u8]) -> Option<String> {
    let header = elf::FileHeader64::<Endianness>::parse(program).ok()?;
    let endian = header.endian().ok()?;
    let headers = header.program_headers(endian, program).ok()?;
    let found = headers.iter().find_map(|header| header.interpreter(endian, program).ok()?)?;
    Some(String::from_utf8_lossy(found).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_this_system_load_the_library() {
        let shell = find(OsStr::new("sh")).unwrap();
        assert_eq!(obstacle(&shell).unwrap(), None);
        assert_eq!(obstacle(&env::current_exe().unwrap()).unwrap(), None);
    }

    #[test]
    fn a_script_is_judged_by_its_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/usr/bin/env -S A=1 sh -e\n").unwrap();
        assert_eq!(obstacle(&script).unwrap(), None);
        fs::write(&script, format!("#!{}\n", script.display())).unwrap();
        assert_eq!(obstacle(&script).unwrap(), None, "a script that names itself");
        fs::write(&script, "#! /no/such/interpreter\n").unwrap();
        assert!(obstacle(&script).is_err());
    }

    #[test]
    fn other_files_are_named() {
        let mut program = fs::read(env::current_exe().unwrap()).unwrap();
        // The class of the file, in its fifth byte.
        program[4] = 1;
        assert_eq!(unloadable(&program), Some(Obstacle::ThirtyTwoBit));
        program[4] = 2;
        // The processor, in the bytes 18 and 19: SPARC.
        program[18..20].copy_from_slice(&[2, 0]);
        assert_eq!(unloadable(&program), Some(Obstacle::OtherProcessor));
        assert_eq!(unloadable(b"no program"), None);
        assert_eq!(unloadable(&[]), None);
    }
}
