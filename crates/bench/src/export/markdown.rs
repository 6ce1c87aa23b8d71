//! A report as Markdown, for an issue, a commit message or a page.

use super::escape::markdown as escape;
use crate::view::{Advice, View};
use std::fmt::Write;

/// Renders the reports as Markdown, one after the other.
pub fn render(views: &[View]) -> String {
    views.iter().map(one).collect::<Vec<_>>().join("\n")
}

fn one(view: &View) -> String {
    let mut text = format!("# {}\n\n", view.title);
    for verdict in &view.verdicts {
        let how = verdict.how.as_ref().filter(|how| !how.is_empty());
        let how = how.map_or(String::new(), |how| format!(" ({})", escape(how)));
        let _ = writeln!(
            text,
            "- **{}, {}**: {}{how}",
            verdict.question.title(),
            verdict.confidence.name(),
            escape(&verdict.statement)
        );
    }
    for answer in &view.answers {
        let _ = writeln!(text, "- {}", escape(answer));
    }
    let _ = writeln!(text);
    for line in &view.setting {
        let _ = writeln!(text, "{}  ", escape(line));
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
    for note in &view.notes {
        let _ = writeln!(text, "{}\n", escape(note));
    }
    for Advice { setting, command, safety, risk } in &view.advice {
        let command = escape(command);
        let (safety, risk) = (escape(safety), escape(risk));
        let _ = writeln!(text, "- {}: {command} ({safety}: {risk})", escape(setting));
    }
    for warning in &view.warnings {
        let _ = writeln!(text, "- warning: {}", escape(warning));
    }
    text
}
