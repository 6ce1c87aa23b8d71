//! Directory listings: an HTML page for browsers, JSON for programs.
//!
//! The page has no scripts: its column headings are links that request another order. Names are
//! escaped for HTML and percent-encoded in links, so that a client that may upload files cannot
//! inject a script into the page.

use haul_fs::Blocking;
use haul_fs::Root;
use haul_http::target::{Target, encode_path, encode_segment};
use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// The largest number of entries in a listing. A larger directory is listed in part, and its page
/// reports that.
const ENTRIES_MAX: usize = 10_000;

const STYLE: &str = include_str!("listing.css");

/// The entries of a directory in the requested order.
#[derive(Debug)]
pub struct Listing {
    path: Vec<u8>,
    sort: Sort,
    is_descending: bool,
    /// Whether the query requests JSON; `None` if it requests no format.
    is_json: Option<bool>,
    entries: Vec<Entry>,
    is_truncated: bool,
}

/// A listing as a response body.
#[derive(Debug, Clone)]
pub struct RenderedListing {
    /// Whether it is JSON; otherwise HTML.
    pub is_json: bool,
    /// The content.
    pub content: Arc<[u8]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Name,
    Size,
    Modified,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: Vec<u8>,
    is_directory: bool,
    size_bytes: u64,
    modified_seconds: i64,
}

/// An entry of a JSON listing.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "ListingEntry")]
pub struct JsonEntry<'e> {
    /// The name. Bytes that are not UTF-8 are U+FFFD.
    name: Cow<'e, str>,
    /// `file` or `folder`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Size in bytes.
    size: u64,
    /// Time of the last change, RFC 3339.
    mtime: String,
}

impl Listing {
    /// Reads a directory. Symbolic links are resolved below `root`, so a link that leads out of it
    /// is not listed.
    pub fn read(
        root: &Root,
        directory: &File,
        target: &Target<'_>,
        shows_hidden: bool,
    ) -> io::Result<Self> {
        let mut entries = Vec::new();
        let mut is_truncated = false;
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || (!shows_hidden && name.starts_with(b".")) {
                continue;
            }
            if entries.len() == ENTRIES_MAX {
                is_truncated = true;
                break;
            }
            entries.extend(Entry::of(root, directory, &target.path, name));
        }
        let sort = match target.parameter("sort") {
            Some("size") => Sort::Size,
            Some("modified") => Sort::Modified,
            _ => Sort::Name,
        };
        let is_descending = target.parameter("order") == Some("desc");
        entries.sort_by(|one, other| {
            let by_name = one.name.cmp(&other.name);
            let order = match sort {
                Sort::Name => by_name,
                Sort::Size => one.size_bytes.cmp(&other.size_bytes).then(by_name),
                Sort::Modified => one.modified_seconds.cmp(&other.modified_seconds).then(by_name),
            };
            // Directories come first in every order.
            let order = if is_descending { order.reverse() } else { order };
            other.is_directory.cmp(&one.is_directory).then(order)
        });
        let is_json = target.parameter("format").map(|format| format == "json");
        Ok(Self { path: target.path.clone(), sort, is_descending, is_json, entries, is_truncated })
    }

    /// Renders the listing in the format that the query requests (`?format=json`, `?format=html`),
    /// or else in the one that the client prefers.
    pub fn render(&self, accepts_json: bool) -> RenderedListing {
        let is_json = self.is_json.unwrap_or(accepts_json);
        RenderedListing {
            is_json,
            content: if is_json { self.to_json() } else { self.to_html() }.into(),
        }
    }

    /// Renders JSON: an array of objects with `name`, `type` (`file` or `folder`), `size` in bytes
    /// and `mtime` in RFC 3339. Bytes of a name that are not UTF-8 become U+FFFD.
    fn to_json(&self) -> Vec<u8> {
        let entries: Vec<_> = self
            .entries
            .iter()
            .map(|entry| JsonEntry {
                name: String::from_utf8_lossy(&entry.name),
                kind: if entry.is_directory { "folder" } else { "file" },
                size: entry.size_bytes,
                mtime: entry.modified().to_string(),
            })
            .collect();
        let mut json = serde_json::to_vec_pretty(&entries).unwrap_or_default();
        json.push(b'\n');
        json
    }

    /// Renders an HTML page.
    fn to_html(&self) -> Vec<u8> {
        let mut html = String::new();
        // Writing to a String does not fail.
        let _ = self.write_html(&mut html);
        html.into_bytes()
    }

    fn write_html(&self, html: &mut String) -> std::fmt::Result {
        let shown = escape(&format!("/{}", String::from_utf8_lossy(&self.path)));
        write!(
            html,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{shown}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>"
        )?;
        self.write_breadcrumbs(html)?;
        write!(html, "</h1>\n<table>\n<thead><tr>")?;
        for (sort, name, parameter) in [
            (Sort::Name, "Name", "name"),
            (Sort::Size, "Size", "size"),
            (Sort::Modified, "Modified", "modified"),
        ] {
            let is_current = sort == self.sort;
            let order = if is_current && !self.is_descending { "desc" } else { "asc" };
            let (aria, arrow) = match (is_current, self.is_descending) {
                (false, _) => ("", ""),
                (true, false) => (" aria-sort=\"ascending\"", " \u{2191}"),
                (true, true) => (" aria-sort=\"descending\"", " \u{2193}"),
            };
            write!(
                html,
                "<th{aria}><a href=\"?sort={parameter}&amp;order={order}\">{name}{arrow}</a></th>"
            )?;
        }
        html.push_str("</tr></thead>\n<tbody>\n");
        if !self.path.is_empty() {
            html.push_str("<tr><td><a href=\"../\">../</a></td><td></td><td></td></tr>\n");
        }
        for entry in &self.entries {
            entry.write_row(html)?;
        }
        html.push_str("</tbody>\n</table>\n");
        let count = self.entries.len();
        match (count, self.is_truncated) {
            (0, _) => html.push_str("<p>This folder is empty.</p>\n"),
            (_, true) => writeln!(html, "<p>Only {count} entries are shown: there are more.</p>")?,
            (1, _) => html.push_str("<p>1 entry</p>\n"),
            _ => writeln!(html, "<p>{count} entries</p>")?,
        }
        html.push_str("</body>\n</html>\n");
        Ok(())
    }

    /// Writes the path of the directory, with a link to each directory in it.
    fn write_breadcrumbs(&self, html: &mut String) -> std::fmt::Result {
        html.push_str("<a href=\"/\">/</a>");
        let mut end = 0;
        for segment in self.path.split(|&byte| byte == b'/').filter(|segment| !segment.is_empty()) {
            end += segment.len();
            let link = encode_path(&self.path[..end]);
            write!(html, "<a href=\"{link}/\">{}/</a>", escape(&String::from_utf8_lossy(segment)))?;
            end += 1;
        }
        Ok(())
    }
}

impl Entry {
    fn of(root: &Root, directory: &File, path: &[u8], name: &[u8]) -> Option<Self> {
        let mut stat =
            rustix::fs::statat(directory.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            let below = if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() };
            let flags = OFlags::PATH;
            let file =
                root.open_below(&below, flags, rustix::fs::Mode::empty(), Blocking::Disk).ok()?;
            stat = rustix::fs::fstat(&file).ok()?;
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        matches!(kind, FileType::RegularFile | FileType::Directory).then(|| Self {
            name: name.to_vec(),
            is_directory: kind == FileType::Directory,
            size_bytes: if kind == FileType::Directory { 0 } else { stat.st_size as u64 },
            modified_seconds: stat.st_mtime,
        })
    }

    fn modified(&self) -> jiff::Timestamp {
        jiff::Timestamp::from_second(self.modified_seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }

    fn write_row(&self, html: &mut String) -> std::fmt::Result {
        let slash = if self.is_directory { "/" } else { "" };
        // With `./` in front, a name with a colon is not parsed as a scheme.
        let link = encode_segment(&self.name);
        let name = escape(&String::from_utf8_lossy(&self.name));
        let size = if self.is_directory { String::new() } else { format_size(self.size_bytes) };
        let modified = self.modified();
        writeln!(
            html,
            "<tr><td><a href=\"./{link}{slash}\">{name}{slash}</a></td>\
             <td title=\"{} bytes\">{size}</td>\
             <td><time datetime=\"{modified}\">{}</time></td></tr>",
            self.size_bytes,
            modified.strftime("%Y-%m-%d %H:%M"),
        )
    }
}

fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

/// Escapes text for HTML elements and attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_fs::Symlinks;
    use std::fs;

    fn listing(folder: &std::path::Path, target: &str) -> Listing {
        let root = Root::open(folder, Symlinks::Inside).unwrap();
        let target = Target::parse(target).unwrap();
        Listing::read(&root, &File::open(folder).unwrap(), &target, false).unwrap()
    }

    fn names(listing: &Listing) -> Vec<String> {
        listing
            .entries
            .iter()
            .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
            .collect()
    }

    #[test]
    fn a_listing_has_the_requested_order_with_directories_first() {
        let folder = tempfile::tempdir().unwrap();
        for (name, size) in [("b", 3), ("a", 20), ("c", 1), (".hidden", 1)] {
            fs::write(folder.path().join(name), vec![0; size]).unwrap();
        }
        fs::create_dir(folder.path().join("z")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("out")).unwrap();
        std::os::unix::fs::symlink("z", folder.path().join("in")).unwrap();
        let sorted = |target| names(&listing(folder.path(), target));
        assert_eq!(sorted("/"), ["in", "z", "a", "b", "c"]);
        assert_eq!(sorted("/?sort=name&order=desc"), ["z", "in", "c", "b", "a"]);
        assert_eq!(sorted("/?sort=size"), ["in", "z", "c", "b", "a"]);
        assert_eq!(sorted("/?sort=nonsense&order=<script>"), ["in", "z", "a", "b", "c"]);
        let json: serde_json::Value =
            serde_json::from_slice(&listing(folder.path(), "/").to_json()).unwrap();
        assert_eq!(json[2]["name"], "a");
        assert_eq!(json[2]["size"], 20);
        assert_eq!(json[1]["type"], "folder");
    }

    #[test]
    fn a_file_name_cannot_inject_html() {
        let folder = tempfile::tempdir().unwrap();
        let name = "\"><img src=x onerror='alert(1)'>&";
        fs::write(folder.path().join(name), "").unwrap();
        fs::write(folder.path().join("javascript:alert(1)"), "").unwrap();
        let html = String::from_utf8(listing(folder.path(), "/").to_html()).unwrap();
        assert!(!html.contains("<img") && !html.contains("onerror='"), "{html}");
        assert!(html.contains("href=\"./%22%3E%3Cimg%20src"), "{html}");
        assert!(html.contains("href=\"./javascript%3Aalert"), "{html}");
    }

    #[test]
    fn sizes_are_formatted_with_binary_units() {
        let shown: Vec<_> = [0, 1023, 1024, 1536, 1 << 20, (1 << 20) - 1, u64::MAX]
            .into_iter()
            .map(format_size)
            .collect();
        assert_eq!(
            shown,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "16384.0 PiB"]
        );
    }
}
