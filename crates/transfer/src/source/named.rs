//! What the user names as a source.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A source as the user named it.
#[derive(Debug, PartialEq, Eq)]
pub enum NamedSource {
    /// The content of a folder, by a path that ends with a slash.
    Content(Vec<u8>),
    /// A file, or a folder with its content.
    Entry(Vec<u8>),
    /// A file or a folder that keeps its path below another folder (`--relative`).
    Below {
        /// The folder where the kept path begins.
        base: Vec<u8>,
        /// The components of the kept path: one at least.
        names: Vec<Vec<u8>>,
        /// Whether the path ends with a slash, so that a link to a folder is followed.
        follows: bool,
    },
}

impl NamedSource {
    /// Parses a path. If `is_relative`, the copy keeps the path, or the part after `/./`.
    pub fn new(path: &[u8], is_relative: bool) -> Self {
        // Without a path, the home directory of the other host is meant.
        let path = if path.is_empty() { b"." } else { path };
        if is_relative { Self::below(path) } else { Self::alone(path) }
    }

    fn alone(path: &[u8]) -> Self {
        let is_content = path.ends_with(b"/") || path == b"." || path.ends_with(b"/.") || {
            path == b".." || path.ends_with(b"/..")
        };
        let path = path.strip_suffix(b"/.").map_or(path, |_| &path[..path.len() - 1]);
        let path = without_end_slashes(path).to_vec();
        if is_content { Self::Content(path) } else { Self::Entry(path) }
    }

    fn below(path: &[u8]) -> Self {
        let (base, kept) = match path.windows(3).position(|part| part == b"/./") {
            Some(0) => (&b"/"[..], &path[3..]),
            Some(at) => (&path[..at], &path[at + 3..]),
            None if path.starts_with(b"/") => (&b"/"[..], path),
            None => (&b"."[..], path),
        };
        let base = without_end_slashes(base).to_vec();
        let names = kept.split(|&byte| byte == b'/');
        let names = names.filter(|name| !name.is_empty() && *name != b".").map(<[u8]>::to_vec);
        let names: Vec<_> = names.collect();
        let follows = kept.ends_with(b"/") || kept.ends_with(b"/.");
        if names.is_empty() { Self::Content(base) } else { Self::Below { base, names, follows } }
    }

    /// The path that leads to the source.
    pub fn path(&self) -> Vec<u8> {
        match self {
            Self::Content(path) | Self::Entry(path) => path.clone(),
            Self::Below { base, names, .. } => {
                let kept = names.join(&b'/');
                match &base[..] {
                    b"." => kept,
                    b"/" => [b"/", &kept[..]].concat(),
                    base => [base, b"/", &kept[..]].concat(),
                }
            }
        }
    }

    /// The path of the copy below the destination; empty for the destination itself.
    pub fn kept_names(&self) -> Vec<Vec<u8>> {
        match self {
            Self::Content(_) => Vec::new(),
            Self::Entry(path) => vec![split(path).1.to_vec()],
            Self::Below { names, .. } => names.clone(),
        }
    }

    /// Whether something has the path.
    pub fn exists(&self) -> bool {
        let follows = matches!(self, Self::Content(_));
        let flags = if follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        rustix::fs::statat(CWD, &self.path()[..], flags).is_ok()
    }
}

fn without_end_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(1, |last| last + 1);
    &path[..end.min(path.len())]
}

/// Opens a folder that the user named, whose path may lead through links. The path of a confined
/// process does not lead out of the present folder.
pub fn open_named(path: &[u8], access: OFlags, is_confined: bool) -> rustix::io::Result<OwnedFd> {
    let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if is_confined {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        return rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
    }
    rustix::fs::open(path, flags, Mode::empty())
}

/// The folder and the last component of a path.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// The components of the path that a source has below the destination; no components for a source
/// whose content is copied into the destination itself. With `is_relative`, a source keeps its
/// whole path, or the part after `/./`.
pub fn kept_names(path: &Path, is_relative: bool) -> Vec<Vec<u8>> {
    NamedSource::new(path.as_os_str().as_bytes(), is_relative).kept_names()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_at_the_end_stands_for_the_content() {
        let source = |path: &[u8]| NamedSource::new(path, false);
        assert_eq!(source(b"a/b"), NamedSource::Entry(b"a/b".to_vec()));
        assert_eq!(source(b"a/b//"), NamedSource::Content(b"a/b".to_vec()));
        assert_eq!(source(b"a/."), NamedSource::Content(b"a".to_vec()));
        assert_eq!(source(b".."), NamedSource::Content(b"..".to_vec()));
        assert_eq!(source(b"/"), NamedSource::Content(b"/".to_vec()));
        assert_eq!(source(b""), NamedSource::Content(b".".to_vec()));
    }

    #[test]
    fn a_relative_source_keeps_its_path() {
        let kept = |path: &[u8]| {
            let source = NamedSource::new(path, true);
            (source.path(), source.kept_names().join(&b'/'))
        };
        let of = |path: &str, kept: &str| (path.as_bytes().to_vec(), kept.as_bytes().to_vec());
        assert_eq!(kept(b"a/b/c"), of("a/b/c", "a/b/c"));
        assert_eq!(kept(b"/a/b/"), of("/a/b", "a/b"));
        assert_eq!(kept(b"/a/./b/c"), of("/a/b/c", "b/c"));
        assert_eq!(kept(b"/./b"), of("/b", "b"));
        assert_eq!(kept(b"./b"), of("b", "b"));
        assert_eq!(kept(b"a/./"), of("a", ""));
        assert_eq!(kept(b"a/./b//./c"), of("a/b/c", "b/c"));
    }
}
