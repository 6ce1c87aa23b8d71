//! Writes an initramfs: a cpio archive in the format that the kernel unpacks (`newc`, see
//! Documentation/driver-api/early-userspace in the kernel's sources).

use super::{VmError, step};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const FOLDER_MODE: u32 = 0o040_755;
const PROGRAM_MODE: u32 = 0o100_755;
const FILE_MODE: u32 = 0o100_644;

/// Builder of a cpio archive.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder and its parent folders, unless they exist.
    pub fn add_folder(&mut self, name: &str) {
        for (end, _) in name.match_indices('/').chain([(name.len(), "")]) {
            let folder = &name[..end];
            if !folder.is_empty() && self.names.insert(folder.into()) {
                self.write_entry(folder, FOLDER_MODE, &[]);
            }
        }
    }

    /// Adds a copy of the executable file at `path` under `name`.
    fn add_executable(&mut self, path: &Path, name: &str) -> Result<(), VmError> {
        let content = fs::read(path).map_err(step(format!("reading {}", path.display())))?;
        self.add_entry(name, PROGRAM_MODE, &content);
        Ok(())
    }

    /// Adds a file with this content, readable by all and executable by none.
    pub fn add_content(&mut self, name: &str, content: &[u8]) {
        self.add_entry(name, FILE_MODE, content);
    }

    /// Adds a file and its folders. If `name` exists already, the archive does not change.
    fn add_entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        if let Some((folder, _)) = name.rsplit_once('/') {
            self.add_folder(folder);
        }
        if self.names.insert(name.into()) {
            self.write_entry(name, mode, content);
        }
    }

    /// Adds a program as `name`, and its shared libraries at the paths that `ldd` prints.
    pub fn add_program(&mut self, path: &Path, name: &str) -> Result<(), VmError> {
        self.add_executable(path, name)?;
        let listed = Command::new("ldd").arg(path).output().map_err(step("running ldd"))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        // Formats: "libc.so.6 => /lib/libc.so.6 (0x…)" and "/lib64/ld-linux-x86-64.so.2 (0x…)".
        for library in listed
            .lines()
            .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        {
            self.add_executable(Path::new(library), library.trim_start_matches('/'))?;
        }
        Ok(())
    }

    /// Appends the trailer and returns the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.write_entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    /// Appends the header, the name and the content of an entry.
    fn write_entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode == FOLDER_MODE { 2 } else { 1 };
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        // Inode, mode, user, group, links, modification time, size, device (major, minor), special
        // device (major, minor), size of the name with its NUL, checksum (0 in `newc`).
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        self.bytes.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    /// Pads the archive with zeros to a multiple of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Stdio;

    #[test]
    fn cpio_lists_the_entries_of_an_archive() {
        let mut archive = Archive::default();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello").unwrap();
        archive.add_executable(file.path(), "some/where/file").unwrap();
        archive.add_executable(file.path(), "some/where/file").unwrap();
        archive.add_folder("some/else");
        let mut cpio = match Command::new("cpio")
            .arg("-t")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        {
            Ok(cpio) => cpio,
            Err(error) => {
                return eprintln!("SKIPPED: the archive is not checked with cpio: {error}");
            }
        };
        cpio.stdin.take().unwrap().write_all(&archive.finish()).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(output.status.success());
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "some\nsome/where\nsome/where/file\nsome/else\n"
        );
    }
}
