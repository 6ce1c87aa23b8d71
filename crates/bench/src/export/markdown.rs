//! A report as Markdown, for an issue, a commit message or a page.

use super::{COLUMNS, MORE_COLUMNS, groups, notes, setting};
use crate::report::Report;
use std::fmt::Write;

/// The report as Markdown.
pub fn render(report: &Report) -> String {
    let mut text = format!("# haul bench {}\n\n", report.experiment);
    for words in &report.answers {
        let _ = writeln!(text, "- {}", escape(words));
    }
    let _ = writeln!(text);
    for words in setting(report) {
        let _ = writeln!(text, "{}  ", escape(&words));
    }
    for (title, rows) in groups(report) {
        let _ = writeln!(text, "\n## {}\n", escape(&title));
        let columns = || COLUMNS.iter().chain(&MORE_COLUMNS);
        let heads: Vec<String> = columns().map(|column| escape(&column.head.replace('\n', " "))).collect();
        let _ = writeln!(text, "| {} |", heads.join(" | "));
        let _ = writeln!(text, "|---|{}", "---:|".repeat(heads.len() - 1));
        for row in rows {
            match &row.refused {
                None => {
                    let cells: Vec<String> = columns().map(|column| escape(&(column.says)(row))).collect();
                    let _ = writeln!(text, "| {} |", cells.join(" | "));
                }
                Some(reason) => {
                    let rest = " |".repeat(heads.len() - 1);
                    let _ = writeln!(text, "| {}: {}{rest}", escape(&row.path), escape(reason));
                }
            }
        }
    }
    let _ = writeln!(text);
    for words in notes(report) {
        let _ = writeln!(text, "{}\n", escape(&words));
    }
    for warning in &report.warnings {
        let _ = writeln!(text, "- warning: {}", escape(&warning.detail));
    }
    text
}

/// Keeps text from ending a cell or becoming markup.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '|' | '\\' | '`' | '*' | '_' | '<' | '>' | '[' | ']') {
            escaped.push('\\');
        }
        escaped.push(if character.is_control() { ' ' } else { character });
    }
    escaped
}
