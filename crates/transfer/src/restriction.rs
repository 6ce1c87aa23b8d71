//! `haul receive --only`: what a key that `authorized_keys` restricts may ask for.

use crate::handshake::{Request, Role};
use crate::options::{Deletion, DeletionMode, Delta, Replacement};

/// What may be asked for. All paths begin at one folder, in which this process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restriction {
    /// Everything within the folder.
    ReadWrite,
    /// Files may be copied from the folder.
    ReadOnly,
    /// New files may be copied into the folder. What exists stays as it is.
    AppendOnly,
}

impl Restriction {
    /// Restricts a request. The error is the reason to refuse the request.
    pub fn apply(self, request: &mut Request) -> Result<(), String> {
        match (self, request.role) {
            (Self::ReadOnly, Role::Destination) => {
                return Err("this key may only read (haul receive --read-only)".into());
            }
            (Self::AppendOnly, Role::Source) => {
                return Err("this key may only add files (haul receive --append-only)".into());
            }
            _ => {}
        }
        for path in &mut request.paths {
            *path = within(path)?;
        }
        let options = &mut request.options;
        options.is_confined = true;
        for path in &options.earlier_copies {
            let base = request.paths.first().map_or(&b""[..], |path| path);
            check_earlier(base, path)?;
        }
        if self == Self::AppendOnly {
            if options.deletion.mode != DeletionMode::No {
                return Err("this key may not delete (haul receive --append-only)".into());
            }
            options.deletion = Deletion::default();
            // Answers about blocks would reveal the content of earlier copies.
            options.delta = Delta::No;
            options.replacement =
                Replacement { keeps_existing: true, keeps_folders: true, ..options.replacement };
        }
        Ok(())
    }
}

/// A path as a path below the folder, which `/` stands for.
fn within(path: &[u8]) -> Result<Vec<u8>, String> {
    if path.split(|&byte| byte == b'/').any(|name| name == b"..") {
        let path = String::from_utf8_lossy(path);
        return Err(format!("{path}: this key may not name paths with .."));
    }
    let begin = path.iter().position(|&byte| byte != b'/').unwrap_or(path.len());
    match &path[begin..] {
        b"" if path.is_empty() => Ok(Vec::new()),
        b"" => Ok(b"./".to_vec()),
        path => Ok(path.to_vec()),
    }
}

/// Refuses the path of an earlier copy that leads out of the folder. The path begins at the
/// destination.
fn check_earlier(destination: &[u8], path: &[u8]) -> Result<(), String> {
    let components = |path: &'_ [u8]| -> Vec<Vec<u8>> {
        let names = path.split(|&byte| byte == b'/');
        names.filter(|name| !name.is_empty() && *name != b".").map(<[u8]>::to_vec).collect()
    };
    let mut depth = components(destination).len();
    let is_within = !path.starts_with(b"/")
        && components(path).iter().all(|name| {
            let next = if name == b".." { depth.checked_sub(1) } else { Some(depth + 1) };
            depth = next.unwrap_or(0);
            next.is_some()
        });
    if is_within {
        return Ok(());
    }
    let path = String::from_utf8_lossy(path);
    Err(format!("{path}: this key may not name an earlier copy outside of its directory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    fn request(role: Role, path: &str) -> Request {
        let (paths, options) = (vec![path.as_bytes().to_vec()], Options::default());
        Request { role, paths, options, direct: None, is_chained: false }
    }

    #[test]
    fn paths_stay_within_the_folder() {
        for (path, expected) in [
            ("a/b", Some("a/b")),
            ("/a/", Some("a/")),
            ("/", Some("./")),
            ("", Some("")),
            ("a..b", Some("a..b")),
            ("a/../../b", None),
            ("..", None),
        ] {
            let mut request = request(Role::Source, path);
            let applied = Restriction::ReadOnly.apply(&mut request).ok();
            let path = applied.map(|()| String::from_utf8(request.paths[0].clone()).unwrap());
            assert_eq!(path.as_deref(), expected);
        }
    }

    #[test]
    fn earlier_copies_stay_within_the_folder() {
        for (destination, earlier, is_allowed) in [
            ("a/today", "../yesterday", true),
            ("a", "../../etc", false),
            ("a", "../b/../../c", false),
            ("a", "/etc", false),
            ("", "b", true),
            ("", "..", false),
        ] {
            let mut request = request(Role::Destination, destination);
            request.options.earlier_copies = vec![earlier.as_bytes().to_vec()];
            let applied = Restriction::ReadWrite.apply(&mut request);
            assert_eq!(applied.is_ok(), is_allowed, "{destination} {earlier}");
        }
    }

    #[test]
    fn a_key_does_only_what_it_may() {
        let mut push = request(Role::Destination, "a");
        assert!(Restriction::ReadOnly.apply(&mut push).is_err());
        assert!(Restriction::AppendOnly.apply(&mut request(Role::Source, "a")).is_err());
        push.options.delta = Delta::Fixed;
        Restriction::AppendOnly.apply(&mut push).unwrap();
        assert!(push.options.replacement.keeps_existing);
        assert_eq!(push.options.delta, Delta::No);
        push.options.deletion.mode = DeletionMode::All;
        assert!(Restriction::AppendOnly.apply(&mut push).is_err());
        assert!(Restriction::ReadWrite.apply(&mut push).is_ok());
    }
}
