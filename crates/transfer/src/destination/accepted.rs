//! What the user accepts in the destination. A source at the other end may be hostile.

use std::collections::BTreeSet;

/// What the user's end accepts in the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcceptedPaths {
    /// Everything, because the source is the user's end.
    All,
    /// Everything, because the user asked for the content of a folder.
    Content,
    /// The paths of the sources that the user asked for, below the destination, with everything in
    /// these paths.
    These(BTreeSet<Vec<u8>>),
}

impl AcceptedPaths {
    /// The paths of the sources that the user asked for, by their components.
    pub fn of(paths: impl IntoIterator<Item = Vec<Vec<u8>>>) -> Self {
        let paths: BTreeSet<_> = paths.into_iter().map(|names| names.join(&b'/')).collect();
        if paths.contains(&b""[..]) { Self::Content } else { Self::These(paths) }
    }

    /// Whether the source may send a single file, so that the destination path is the name of the
    /// copy and not a folder. If the user asked for several paths or for the content of a folder, a
    /// hostile source could otherwise make this end write into the parent of the destination.
    pub(crate) fn may_be_single(&self) -> bool {
        match self {
            Self::All => true,
            Self::Content => false,
            Self::These(paths) => paths.len() == 1,
        }
    }

    /// Whether an entry with this path is accepted. A folder may lead to an accepted path.
    pub(crate) fn accepts(&self, path: &[u8], is_folder: bool) -> bool {
        let Self::These(paths) = self else { return true };
        let mut slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        paths.contains(path)
            || slashes.any(|(at, _)| paths.contains(&path[..at]))
            || is_folder && {
                let below = [path, b"/"].concat();
                paths.range(below.clone()..).next().is_some_and(|next| next.starts_with(&below))
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_accepted_with_everything_below() {
        let names = |path: &str| path.split('/').map(|name| name.as_bytes().to_vec()).collect();
        let accepted = AcceptedPaths::of([names("a/b"), names("c")]);
        for (path, is_folder, expected) in [
            ("a", true, true),
            ("a", false, false),
            ("a/b", false, true),
            ("a/b", true, true),
            ("a/b/c/d", false, true),
            ("a/bc", false, false),
            ("c", false, true),
            ("c/d", true, true),
            ("d", true, false),
            ("", true, false),
        ] {
            assert_eq!(accepted.accepts(path.as_bytes(), is_folder), expected, "{path}");
        }
        assert_eq!(AcceptedPaths::of([names("a"), Vec::new()]), AcceptedPaths::Content);
    }
}
