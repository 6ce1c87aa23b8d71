//! Tables for a terminal.

use super::{COLUMNS, Column, MORE_COLUMNS, groups, notes, setting};
use crate::report::{Report, Row};
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// One line, under the heads.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// The report as text for a terminal `width` columns wide: more columns where there is room.
pub fn render(report: &Report, width: u16) -> String {
    let width = usize::from(width.clamp(40, 400));
    let mut page = Page { text: String::new(), width };
    for words in setting(report) {
        page.paragraph(&words);
    }
    for (title, rows) in groups(report) {
        page.paragraph("");
        page.paragraph(&title);
        let (refused, measured): (Vec<&Row>, Vec<&Row>) =
            rows.iter().copied().partition(|row| row.refused.is_some());
        if !measured.is_empty() {
            page.table(&measured);
        }
        for row in refused {
            page.paragraph(&format!("{}: {}", row.path, row.refused.as_deref().unwrap_or_default()));
        }
    }
    page.paragraph("");
    for words in notes(report) {
        page.paragraph(&words);
    }
    for warning in &report.warnings {
        page.paragraph(&format!("warning: {}", warning.detail));
    }
    page.paragraph("");
    for words in &report.answers {
        page.paragraph(words);
    }
    page.text
}

struct Page {
    text: String,
    width: usize,
}

impl Page {
    fn paragraph(&mut self, words: &str) {
        let options = textwrap::Options::new(self.width).subsequent_indent("  ");
        self.text.push_str(&textwrap::fill(words, options));
        self.text.push('\n');
    }

    fn table(&mut self, rows: &[&Row]) {
        let all: Vec<&Column> = COLUMNS.iter().chain(&MORE_COLUMNS).collect();
        let wide = table(rows, &all);
        let fits = wide.lines().all(|line| line.chars().count() <= self.width);
        self.text.push_str(&if fits { wide } else { table(rows, &all[..COLUMNS.len()]) });
        self.text.push('\n');
    }
}

fn table(rows: &[&Row], columns: &[&Column]) -> String {
    let line = |texts: Vec<String>| {
        texts.into_iter().enumerate().map(|(index, text)| {
            let side = if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(side)
        })
    };
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(line(columns.iter().map(|column| column.head.to_owned()).collect()));
    for row in rows {
        table.add_row(line(columns.iter().map(|column| (column.says)(row)).collect()));
    }
    for column in table.column_iter_mut() {
        column.set_padding((1, 0));
    }
    table.to_string()
}
