//! Reports as one self-contained HTML page: charts, tables and text, for light and dark displays,
//! phone and desktop, without scripts.

use super::escape::html as escape;
use super::summary::verdict_html;
use crate::summary::Summary;
use crate::view::{Advice, Bar, Group, Line, LineRole, View};
use std::fmt::Write;

const STYLE: &str = include_str!("html.css");

/// Renders the page of a run: its summary first, then a section for each report.
pub fn render_run(summary: &Summary, views: &[View]) -> String {
    page(&summary.title("haul bench"), &super::summary::html(summary), views)
}

/// Renders the page of one report, or of several without a summary.
pub fn render(title: &str, views: &[View]) -> String {
    page(title, "", views)
}

fn page(title: &str, summary: &str, views: &[View]) -> String {
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n{summary}",
        title = escape(title)
    );
    if views.len() > 1 {
        page.push_str("<nav><ul>\n");
        for (number, view) in views.iter().enumerate() {
            let _ =
                writeln!(page, "<li><a href=\"#report-{number}\">{}</a></li>", escape(&view.title));
        }
        page.push_str("</ul></nav>\n");
    }
    for (number, view) in views.iter().enumerate() {
        let _ = writeln!(page, "<article id=\"report-{number}\">");
        if views.len() > 1 {
            let _ = writeln!(page, "<h2>{}</h2>", escape(&view.title));
        }
        body(&mut page, view);
        page.push_str("</article>\n");
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn body(page: &mut String, view: &View) {
    if !view.verdicts.is_empty() {
        page.push_str("<dl>\n");
        view.verdicts.iter().for_each(|verdict| page.push_str(&verdict_html(verdict)));
        page.push_str("</dl>\n");
    }
    if !view.warnings.is_empty() {
        let count = view.warnings.len();
        let _ = writeln!(page, "<details class=\"warnings\"><summary>Warnings: {count}</summary>");
        list(page, "warnings", &view.warnings);
        page.push_str("</details>\n");
    }
    list(page, "answers", &view.answers);
    for line in &view.setting {
        let _ = writeln!(page, "<p class=\"setting\">{}</p>", escape(line));
    }
    page.push_str("<p class=\"legend\">");
    for (class, meaning) in &view.legend {
        let _ = writeln!(page, "<span class=\"key {class}\"></span> {}", escape(meaning));
    }
    let _ = writeln!(
        page,
        "— {} The thin line is the 95 % interval of the median; the dashed line is the row that \
         the others are compared with.</p>",
        escape(view.unit)
    );
    for group in &view.groups {
        let _ = writeln!(page, "<section>\n<h3>{}</h3>", escape(&group.title));
        if group.lines.iter().any(is_drawn) {
            chart(page, group);
        }
        table(page, view, group);
        page.push_str("</section>\n");
    }
    for drawing in &view.drawings {
        let _ = writeln!(
            page,
            "<section>\n<h3>{}</h3>\n<div class=\"scroll\">{}</div></section>",
            escape(&drawing.title),
            drawing.svg
        );
    }
    if !view.advice.is_empty() {
        advice(page, &view.advice);
    }
    if !view.notes.is_empty() {
        page.push_str("<h3>Notes on the figures</h3>\n");
        list(page, "notes", &view.notes);
    }
}

/// Writes the settings with their commands, which can be copied.
fn advice(page: &mut String, advice: &[Advice]) {
    page.push_str("<h3>The settings</h3>\n<dl>\n");
    for Advice { setting, command, safety, risk } in advice {
        let class = safety.replace(' ', "-");
        let _ = writeln!(
            page,
            "<dt>{} <span class=\"badge {}\">{}</span></dt>\n<dd><pre><code>{}</code></pre>{}</dd>",
            escape(setting),
            escape(&class),
            escape(safety),
            escape(command),
            escape(risk)
        );
    }
    page.push_str("</dl>\n");
}

/// The shortest interval that is drawn, in percent of the chart's width. A shorter one is a dot.
const INTERVAL_PERCENT_MIN: f64 = 0.3;

/// Whether a row has a line in the chart.
fn is_drawn(line: &Line) -> bool {
    line.refused.is_some() || !line.bars.is_empty()
}

/// Writes one line per row, with a bar for each of its figures. A dashed line marks the value of
/// the row that the others are compared with.
fn chart(page: &mut String, group: &Group) {
    let baseline = group.lines.iter().find(|line| line.role == LineRole::Baseline);
    let baseline = baseline.and_then(|line| line.bars.first()).map_or(String::new(), |bar| {
        let percent = (100.0 * bar.estimate.median / bar.full).clamp(0.0, 100.0);
        format!(" style=\"--baseline:{percent:.2}%\"")
    });
    let _ = writeln!(page, "<div class=\"chart\"{baseline}>");
    for line in group.lines.iter().filter(|line| is_drawn(line)) {
        let class = match line.role {
            LineRole::Choice => " choice",
            LineRole::Baseline => " baseline",
            LineRole::Other => "",
        };
        let disturbed = if line.is_disturbed { " disturbed" } else { "" };
        let _ = writeln!(
            page,
            "<div class=\"name{class}\">{}</div>\n<div class=\"bars{disturbed}\">",
            escape(&line.name)
        );
        if let Some(reason) = &line.refused {
            let _ = writeln!(page, "<span class=\"refused\">{}</span>", escape(reason));
        }
        for Bar { class, estimate, remark, full } in &line.bars {
            let percent = |value: f64| (100.0 * value / full).clamp(0.0, 100.0);
            let remark =
                if remark.is_empty() { String::new() } else { format!(" · {}", escape(remark)) };
            let (low, high) = (percent(estimate.low), percent(estimate.high));
            let interval = if estimate.has_interval() && high - low >= INTERVAL_PERCENT_MIN {
                format!(
                    "<div class=\"interval\" style=\"left:{low:.2}%;width:{:.2}%\"></div>",
                    high - low
                )
            } else {
                String::new()
            };
            let digits = if *full < 20.0 { 2 } else { 0 };
            let _ = writeln!(
                page,
                "<div class=\"track\"><div class=\"bar {class}\" style=\"width:{:.2}%\"></div>\
                 {interval}\
                 <span class=\"value\">{:.digits$}{remark}</span></div>",
                percent(estimate.median),
                estimate.median
            );
        }
        page.push_str("</div>\n");
    }
    page.push_str("</div>\n");
}

fn table(page: &mut String, view: &View, group: &Group) {
    // Without a chart the table is expanded.
    let state = if group.lines.iter().any(is_drawn) { "" } else { " open" };
    let _ = write!(
        page,
        "<details class=\"figures\"{state}>\n<summary>All figures</summary>\n\
         <div class=\"scroll\"><table>\n<tr>"
    );
    for head in &view.heads {
        let _ = write!(page, "<th>{}</th>", escape(head).replace('\n', "<br>"));
    }
    page.push_str("</tr>\n");
    for line in group.lines.iter().filter(|line| line.refused.is_none()) {
        page.push_str("<tr>");
        for cell in &line.cells {
            let _ = write!(page, "<td>{}</td>", escape(cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n</details>\n");
}

fn list<'a>(page: &mut String, class: &str, items: impl IntoIterator<Item = &'a String>) {
    let _ = writeln!(page, "<ul class=\"{class}\">");
    for item in items {
        let _ = writeln!(page, "<li>{}</li>", escape(item));
    }
    page.push_str("</ul>\n");
}
