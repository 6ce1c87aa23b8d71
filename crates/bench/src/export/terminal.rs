//! Tables for a terminal.

use super::summary::verdict_lines;
use crate::view::{Advice, Line, View};
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// A single line below the headings.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Renders the report as text for a terminal of `width` columns, the verdicts last. A wider
/// terminal shows more columns. Colours mark the confidence of a verdict if `has_colour`.
pub fn render(view: &View, width: u16, has_colour: bool) -> String {
    let width = usize::from(width.clamp(40, 400));
    let mut page = Page { text: String::new(), width };
    for line in &view.setting {
        page.paragraph(line);
    }
    for group in &view.groups {
        page.paragraph("");
        page.paragraph(&group.title);
        let (refused, measured): (Vec<&Line>, Vec<&Line>) =
            group.lines.iter().partition(|line| line.refused.is_some());
        if !measured.is_empty() {
            page.table(view, &measured);
        }
        for line in refused {
            page.paragraph(&format!(
                "{}: {}",
                line.name,
                line.refused.as_deref().unwrap_or_default()
            ));
        }
    }
    page.paragraph("");
    for note in &view.notes {
        page.paragraph(note);
    }
    for advice in &view.advice {
        let Advice { setting, command, safety, risk } = advice;
        page.paragraph(&format!("{setting}: {command} ({safety}: {risk})"));
    }
    for warning in &view.warnings {
        page.paragraph(&format!("warning: {warning}"));
    }
    page.paragraph("");
    for answer in &view.answers {
        page.paragraph(answer);
    }
    if !view.verdicts.is_empty() {
        page.paragraph("");
    }
    for verdict in &view.verdicts {
        page.text.push_str(&verdict_lines(verdict, page.width, has_colour, true));
    }
    page.text
}

struct Page {
    text: String,
    width: usize,
}

impl Page {
    fn paragraph(&mut self, text: &str) {
        let options = textwrap::Options::new(self.width).subsequent_indent("  ");
        self.text.push_str(&textwrap::fill(text, options));
        self.text.push('\n');
    }

    fn table(&mut self, view: &View, lines: &[&Line]) {
        let wide = table(view, lines, view.heads.len());
        let fits = wide.lines().all(|line| line.chars().count() <= self.width);
        self.text.push_str(&if fits { wide } else { table(view, lines, view.narrow_columns) });
        self.text.push('\n');
    }
}

fn table(view: &View, lines: &[&Line], columns: usize) -> String {
    let aligned = |texts: &mut dyn Iterator<Item = &str>| -> Vec<Cell> {
        texts
            .take(columns)
            .enumerate()
            .map(|(index, text)| {
                let side = if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
                Cell::new(text).set_alignment(side)
            })
            .collect()
    };
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(aligned(&mut view.heads.iter().copied()));
    for line in lines {
        table.add_row(aligned(&mut line.cells.iter().map(String::as_str)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((1, 0));
    }
    table.to_string()
}
