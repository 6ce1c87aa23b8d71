//! A report as Markdown, for an issue, a commit message or a page.

use crate::view::View;
use std::fmt::Write;

/// The reports as Markdown, one after the other.
pub fn render(views: &[View]) -> String {
    views.iter().map(one).collect::<Vec<_>>().join("\n")
}

fn one(view: &View) -> String {
    let mut text = format!("# {}\n\n", view.title);
    for words in &view.answers {
        let _ = writeln!(text, "- {}", escape(words));
    }
    let _ = writeln!(text);
    for words in &view.setting {
        let _ = writeln!(text, "{}  ", escape(words));
    }
    for group in &view.groups {
        let _ = writeln!(text, "\n## {}\n", escape(&group.title));
        let heads: Vec<String> =
            view.heads.iter().map(|head| escape(&head.replace('\n', " "))).collect();
        let _ = writeln!(text, "| {} |", heads.join(" | "));
        let _ = writeln!(text, "|---|{}", "---:|".repeat(heads.len() - 1));
        for line in &group.lines {
            match &line.refused {
                None => {
                    let cells: Vec<String> = line.cells.iter().map(|cell| escape(cell)).collect();
                    let _ = writeln!(text, "| {} |", cells.join(" | "));
                }
                Some(reason) => {
                    let rest = " |".repeat(heads.len() - 1);
                    let _ = writeln!(text, "| {}: {}{rest}", escape(&line.name), escape(reason));
                }
            }
        }
    }
    let _ = writeln!(text);
    for words in &view.notes {
        let _ = writeln!(text, "{}\n", escape(words));
    }
    for words in &view.warnings {
        let _ = writeln!(text, "- warning: {}", escape(words));
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
