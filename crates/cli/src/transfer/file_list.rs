//! `--files-from`: the files to copy, from a list.

use crate::output::Failure;
use clap::Args;
use std::ffi::OsString;
use std::io::Read;

/// The longest path (`PATH_MAX`).
const PATH_BYTES_MAX: usize = 4096;

/// The list of the files to copy.
#[derive(Debug, Args)]
pub struct FileListArguments {
    /// Copy what a file lists, one path in a line, each below the only SRC; - is standard input.
    /// Implies --relative, and directories are copied without their content unless there is -r
    #[arg(long, value_name = "FILE")]
    files_from: Option<OsString>,
    /// Paths in the list end with a zero byte, as find -print0 writes them
    #[arg(short = '0', long, requires = "files_from")]
    from0: bool,
}

impl FileListArguments {
    /// Whether there is a list.
    pub fn is_given(&self) -> bool {
        self.files_from.is_some()
    }

    /// The sources of the command line, or what the list has below the only source.
    pub fn sources(&self, named: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, Failure> {
        let Some(file) = &self.files_from else { return Ok(named) };
        let [base] = &named[..] else {
            let problem = "--files-from needs one SRC, where the paths of the list begin";
            return Err(Failure::bad_input(problem));
        };
        let name = file.display();
        let failed = |error: std::io::Error| Failure::bad_input(format!("{name}: {error}"));
        let mut text = Vec::new();
        if file == "-" {
            std::io::stdin().read_to_end(&mut text).map_err(failed)?;
        } else {
            text = std::fs::read(file).map_err(failed)?;
        }
        // The first /./ would begin the kept path.
        let names = base.split(|&byte| byte == b'/').filter(|name| *name != b".");
        let base = names.collect::<Vec<_>>().join(&b'/');
        let base = if base.is_empty() { b"." } else { &base[..] };
        let mut sources = Vec::new();
        for (at, path) in self.paths(&text) {
            if path.contains(&0) {
                let problem = format!("{name}: the list contains zero bytes: add --from0 (-0)");
                return Err(Failure::bad_input(problem));
            }
            if self.from0 && path.len() > PATH_BYTES_MAX {
                let (number, bytes) = (at + 1, path.len());
                let problem = format!(
                    "{name}, path {number}: it has {bytes} bytes: leave out --from0 (-0) if each \
                     line is a path"
                );
                return Err(Failure::bad_input(problem));
            }
            if path.split(|&byte| byte == b'/').any(|name| name == b"..") {
                let path = String::from_utf8_lossy(path);
                let problem =
                    format!("{name}, path {}: {path:?} contains .., which leads out", at + 1);
                return Err(Failure::bad_input(problem));
            }
            sources.push([base, b"/./", path].concat());
        }
        if sources.is_empty() {
            return Err(Failure::bad_input(format!("{name}: the list is empty")));
        }
        // Each directory is listed once.
        sources.sort_unstable();
        sources.dedup();
        Ok(sources)
    }

    /// The paths of a list, with their places in the list. As by rsync, lines that begin with `#`
    /// or `;` are comments.
    fn paths<'t>(&self, text: &'t [u8]) -> impl Iterator<Item = (usize, &'t [u8])> {
        let (end, has_comments) = if self.from0 { (0, false) } else { (b'\n', true) };
        let paths = text.split(move |&byte| byte == end).enumerate();
        paths.filter_map(move |(at, path)| {
            let path = if has_comments { path.strip_suffix(b"\r").unwrap_or(path) } else { path };
            let is_comment = has_comments && matches!(path.first(), Some(b'#' | b';'));
            (!path.is_empty() && !is_comment).then_some((at, path))
        })
    }
}
