//! An initramfs: a cpio archive in the kernel's format (`newc`, Documentation/driver-api/early-userspace).

use super::{VmError, step};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const FOLDER_MODE: u32 = 0o040_755;
const FILE_MODE: u32 = 0o100_755;

/// An archive that grows entry by entry.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    names: BTreeSet<String>,
}

impl Archive {
    /// A folder, with those it is in.
    pub fn folder(&mut self, name: &str) {
        for (end, _) in name.match_indices('/').chain([(name.len(), "")]) {
            let folder = &name[..end];
            if !folder.is_empty() && self.names.insert(folder.into()) {
                self.entry(folder, FOLDER_MODE, &[]);
            }
        }
    }

    /// A file that is there, as `name`.
    pub fn file(&mut self, path: &Path, name: &str) -> Result<(), VmError> {
        let content = fs::read(path).map_err(step(format!("reading {}", path.display())))?;
        self.content(name, &content);
        Ok(())
    }

    /// A file with this content. A name that is there already stays as it is.
    pub fn content(&mut self, name: &str, content: &[u8]) {
        if let Some((folder, _)) = name.rsplit_once('/') {
            self.folder(folder);
        }
        if self.names.insert(name.into()) {
            self.entry(name, FILE_MODE, content);
        }
    }

    /// A program, with the libraries that its loader asks for, where it asks for them.
    pub fn program(&mut self, path: &Path, name: &str) -> Result<(), VmError> {
        self.file(path, name)?;
        let listed = Command::new("ldd").arg(path).output().map_err(step("running ldd"))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        // "libc.so.6 => /lib/libc.so.6 (0x…)" and "/lib64/ld-linux-x86-64.so.2 (0x…)".
        for library in listed
            .lines()
            .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        {
            self.file(Path::new(library), library.trim_start_matches('/'))?;
        }
        Ok(())
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode == FOLDER_MODE { 2 } else { 1 };
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        // Number, mode, user, group, links, time, size, two devices of two halves each, name's size, check.
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        self.bytes.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    /// To a multiple of four.
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
    fn cpio_reads_what_was_written() {
        let mut archive = Archive::default();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello").unwrap();
        archive.file(file.path(), "some/where/file").unwrap();
        archive.file(file.path(), "some/where/file").unwrap();
        archive.folder("some/else");
        let mut cpio = match Command::new("cpio")
            .arg("-t")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        {
            Ok(cpio) => cpio,
            Err(error) => {
                return eprintln!("SKIPPED: the archive is not read back: {error} (cpio)");
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
