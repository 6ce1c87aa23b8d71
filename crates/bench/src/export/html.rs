//! A report as one self-contained page: charts, tables and words, light and dark, phone and desktop, without
//! scripts.

use super::{COLUMNS, MORE_COLUMNS, groups, notes, setting};
use crate::report::{Report, Row};
use crate::stats::Figure;
use std::fmt::Write;

const STYLE: &str = include_str!("html.css");

/// The page.
pub fn render(report: &Report) -> String {
    let mut page = String::new();
    let title = format!("haul bench {}", report.experiment);
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n",
        title = escape(&title)
    );
    list(&mut page, "answers", report.answers.iter().map(String::as_str));
    for words in setting(report) {
        let _ = writeln!(page, "<p class=\"setting\">{}</p>", escape(&words));
    }
    page.push_str(LEGEND);
    for (title, rows) in groups(report) {
        let _ = writeln!(page, "<section>\n<h2>{}</h2>", escape(&title));
        // Small chunks cost ten times as much: one scale for all would leave nothing to see of the rest.
        let chunk_bytes = rows.first().map_or(0, |row| row.chunk_bytes);
        let comparable = report.rows.iter().filter(|row| row.chunk_bytes == chunk_bytes);
        let scale = comparable.flat_map(costs).map(|cost| cost.high).fold(1.0, f64::max);
        chart(&mut page, &rows, scale);
        table(&mut page, &rows);
        page.push_str("</section>\n");
    }
    page.push_str("<h2>What to know about the figures</h2>\n");
    let notes = notes(report);
    let warnings = report.warnings.iter().map(|warning| warning.detail.as_str());
    list(&mut page, "warnings", notes.iter().map(String::as_str).chain(warnings));
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

const LEGEND: &str = "<p class=\"legend\"><span class=\"key sender\"></span> sending host\n\
    <span class=\"key receiver\"></span> receiving host: µs of CPU per MiB, interrupts included. \
    The thin line is the 95 % interval of the median. Charts of one chunk size share a scale.</p>\n";

fn costs(row: &Row) -> impl Iterator<Item = Figure> {
    row.sender_us_per_mib.into_iter().chain(row.receiver_us_per_mib)
}

/// Two bars a path, sender and receiver, with their intervals.
fn chart(page: &mut String, rows: &[&Row], scale: f64) {
    page.push_str("<div class=\"chart\">\n");
    for row in rows {
        let _ = writeln!(page, "<div class=\"name\">{}</div>\n<div class=\"bars\">", escape(&row.path));
        if let Some(reason) = &row.refused {
            let _ = writeln!(page, "<span class=\"refused\">{}</span>", escape(reason));
        }
        for (class, cost) in [("sender", row.sender_us_per_mib), ("receiver", row.receiver_us_per_mib)] {
            let Some(cost) = cost else { continue };
            let percent = |value: f64| (100.0 * value / scale).clamp(0.0, 100.0);
            let copied = if class == "sender" { copied(row) } else { String::new() };
            let _ = writeln!(
                page,
                "<div class=\"track\"><div class=\"bar {class}\" style=\"width:{:.2}%\"></div>\
                 <div class=\"interval\" style=\"left:{:.2}%;width:{:.2}%\"></div>\
                 <span class=\"value\">{:.0}{copied}</span></div>",
                percent(cost.median),
                percent(cost.low),
                percent(cost.high) - percent(cost.low),
                cost.median
            );
        }
        page.push_str("</div>\n");
    }
    page.push_str("</div>\n");
}

/// A remark on rows that copied against their name.
fn copied(row: &Row) -> String {
    match (row.copied_known_by.as_deref(), row.copied_percent) {
        (Some("notice" | "proof"), Some(percent)) if percent > 1.0 => format!(" · copied {percent:.0} %"),
        _ => String::new(),
    }
}

fn table(page: &mut String, rows: &[&Row]) {
    page.push_str("<details>\n<summary>All figures</summary>\n<div class=\"scroll\"><table>\n<tr>");
    for column in COLUMNS.iter().chain(&MORE_COLUMNS) {
        let _ = write!(page, "<th>{}</th>", escape(column.head).replace('\n', "<br>"));
    }
    page.push_str("</tr>\n");
    for row in rows.iter().filter(|row| row.refused.is_none()) {
        page.push_str("<tr>");
        for column in COLUMNS.iter().chain(&MORE_COLUMNS) {
            let _ = write!(page, "<td>{}</td>", escape(&(column.says)(row)));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n</details>\n");
}

fn list<'a>(page: &mut String, class: &str, items: impl Iterator<Item = &'a str>) {
    let _ = writeln!(page, "<ul class=\"{class}\">");
    for item in items {
        let _ = writeln!(page, "<li>{}</li>", escape(item));
    }
    page.push_str("</ul>\n");
}

fn escape(text: &str) -> String {
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
    fn no_text_becomes_markup() {
        assert_eq!(escape("<a href=\"x\" b='&'>"), "&lt;a href=&quot;x&quot; b=&#39;&amp;&#39;&gt;");
    }
}
