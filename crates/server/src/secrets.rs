//! Reads secret files (keys, passwords) safely.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest secret file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a regular file of at most 1 MiB. The error is a message without the path.
///
/// Other files are refused: opening a FIFO without a writer would block, a device may not end.
pub fn read_secret(path: &Path) -> Result<Vec<u8>, String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(std::io::Error::from);
    let file = File::from(opened.map_err(|error| error.to_string())?);
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Err("it is no regular file".into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it is larger than {FILE_BYTES_MAX} B"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("key"), "secret").unwrap();
        assert_eq!(read_secret(&path("key")).unwrap(), b"secret");
        std::fs::write(path("large"), vec![0; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(read_secret(&path("large")).unwrap_err().contains("larger"));
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, Mode::RUSR, 0).unwrap();
        assert!(read_secret(&path("fifo")).unwrap_err().contains("no regular file"));
        assert!(read_secret(folder.path()).unwrap_err().contains("no regular file"));
        assert!(read_secret(&path("none")).is_err());
    }
}
