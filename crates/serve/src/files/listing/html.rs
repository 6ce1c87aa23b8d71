//! A listing as an HTML page.
//!
//! The page does not have scripts: its column headings are links that request another order. Names
//! are escaped for HTML and percent-encoded in links, so that a client that may upload files cannot
//! inject a script into the page.

use super::{ENTRIES_MAX, Entry, Listing, Sort};
use haul_http::target::encode_path;
use std::fmt::Write;

const STYLE: &str = include_str!("listing.css");

/// Renders a page.
pub(super) fn render(listing: &Listing) -> String {
    let mut html = String::new();
    // Writing to a String does not fail.
    let _ = write_page(listing, &mut html);
    html
}

fn write_page(listing: &Listing, html: &mut String) -> std::fmt::Result {
    let shown = format!("/{}", show(&listing.path));
    write!(
        html,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{shown}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>"
    )?;
    write_breadcrumbs(&listing.path, html)?;
    write!(html, "</h1>\n<table>\n<thead><tr>")?;
    let limit = match listing.page.entries_max {
        ENTRIES_MAX => String::new(),
        limit => format!("&amp;limit={limit}"),
    };
    for (sort, name, parameter) in [
        (Sort::Name, "Name", "name"),
        (Sort::Size, "Size", "size"),
        (Sort::Modified, "Modified", "modified"),
    ] {
        let is_current = sort == listing.page.sort;
        let order = if is_current && !listing.page.is_descending { "desc" } else { "asc" };
        let (aria, arrow) = match (is_current, listing.page.is_descending) {
            (false, _) => ("", ""),
            (true, false) => (" aria-sort=\"ascending\"", " \u{2191}"),
            (true, true) => (" aria-sort=\"descending\"", " \u{2193}"),
        };
        write!(
            html,
            "<th{aria}><a href=\"?sort={parameter}&amp;order={order}{limit}\">{name}{arrow}</a>\
             </th>"
        )?;
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    if !listing.path.is_empty() {
        html.push_str("<tr><td><a href=\"../\">../</a></td><td></td><td></td></tr>\n");
    }
    for entry in &listing.entries {
        write_row(entry, html)?;
    }
    html.push_str("</tbody>\n</table>\n");
    let is_whole = listing.next_query.is_none() && listing.page.after.is_none();
    match listing.entries.len() {
        0 if is_whole => html.push_str("<p>This folder is empty.</p>\n"),
        1 if is_whole => html.push_str("<p>1 entry</p>\n"),
        count if is_whole => writeln!(html, "<p>{count} entries</p>")?,
        count => writeln!(html, "<p>Entries on this page: {count}</p>")?,
    }
    if let Some(next) = &listing.next_query {
        writeln!(html, "<p><a rel=\"next\" href=\"?{}\">Next entries</a></p>", escape(next))?;
    }
    html.push_str("</body>\n</html>\n");
    Ok(())
}

/// Writes the path of the directory, with a link to each directory in it.
fn write_breadcrumbs(path: &[u8], html: &mut String) -> std::fmt::Result {
    html.push_str("<a href=\"/\">/</a>");
    let mut end = 0;
    for segment in path.split(|&byte| byte == b'/').filter(|segment| !segment.is_empty()) {
        end += segment.len();
        let link = encode_path(&path[..end]);
        write!(html, "<a href=\"{link}/\">{}/</a>", show(segment))?;
        end += 1;
    }
    Ok(())
}

fn write_row(entry: &Entry, html: &mut String) -> std::fmt::Result {
    let slash = if entry.is_directory { "/" } else { "" };
    let link = entry.href();
    let name = show(&entry.name);
    let size = if entry.is_directory { String::new() } else { format_size(entry.size_bytes) };
    let modified = entry.modified();
    writeln!(
        html,
        "<tr><td><a href=\"{link}\"><bdi>{name}</bdi>{slash}</a></td>\
         <td title=\"{} bytes\">{size}</td>\
         <td><time datetime=\"{modified}\">{}</time></td></tr>",
        entry.size_bytes,
        modified.strftime("%Y-%m-%d %H:%M"),
    )
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

/// A name as text of a page. Control characters and those that change the direction of text are
/// U+FFFD: with them a name that ends in `gnp.exe` could be shown as one that ends in `exe.png`.
fn show(name: &[u8]) -> String {
    let is_misleading = |character: char| {
        let changes_direction = matches!(
            character,
            '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}'
        );
        let ends_line = matches!(character, '\u{2028}' | '\u{2029}');
        changes_direction || ends_line || character.is_control()
    };
    escape(&String::from_utf8_lossy(name).replace(is_misleading, "\u{FFFD}"))
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

    #[test]
    fn a_name_shows_every_character_in_its_place() {
        assert_eq!(show("rtl\u{202E}gnp.exe".as_bytes()), "rtl\u{FFFD}gnp.exe");
        assert_eq!(show("a\u{2028}b".as_bytes()), "a\u{FFFD}b");
        assert_eq!(show(b"a\tb\x7F"), "a\u{FFFD}b\u{FFFD}");
        assert_eq!(show("\u{5E9}\u{5DC} <".as_bytes()), "\u{5E9}\u{5DC} &lt;");
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
