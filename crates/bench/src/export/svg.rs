//! The chart of a report as a standalone SVG file, for a page that shows images.

use super::escape::html as escape;
use crate::view::{Group, View};
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const BAR_LEFT: f64 = 140.0;
const BAR_WIDTH: f64 = 470.0;
const BAR_HEIGHT: f64 = 11.0;
/// The characters of a legend's line that fit the width.
const LEGEND_COLUMNS: usize = 110;
/// Style sheet, which follows the reader's preference for a light or dark page.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1d2226}\
    .t{font-size:14px;font-weight:600}.q{fill:#5b646b}\
    .sender{fill:#2a6fbb}.receiver{fill:#b9c3cb}\
    @media(prefers-color-scheme:dark){text{fill:#e6e9eb}.q{fill:#9aa4ab}\
    .sender{fill:#5b9fe6}.receiver{fill:#56616a}}";

/// Renders the chart of a report's first group.
pub fn render(view: &View) -> String {
    let mut body = String::new();
    let mut y = 22.0;
    let mut text = |y: f64, class: &str, content: &str| {
        let _ =
            writeln!(body, "<text x=\"0\" y=\"{y}\" class=\"{class}\">{}</text>", escape(content));
    };
    if let Some(group) = view.groups.first() {
        text(y, "t", &format!("{}: {}", view.title, group.title));
    }
    for line in &view.setting {
        y += 17.0;
        text(y, "q", line);
    }
    let has_bar = |class: &str| {
        let lines = view.groups.first().into_iter().flat_map(|group| &group.lines);
        lines.flat_map(|line| &line.bars).any(|bar| bar.class == class)
    };
    let legend: Vec<&str> =
        view.legend.iter().filter(|(class, _)| has_bar(class)).map(|(_, what)| *what).collect();
    let shades = if legend.len() > 1 { " (dark, light)" } else { "" };
    let legend = format!("{}{shades}: {}", legend.join(", "), view.unit);
    for line in textwrap::wrap(&legend, LEGEND_COLUMNS) {
        y += 17.0;
        text(y, "q", &line);
    }
    if let Some(group) = view.groups.first() {
        y = bars(&mut body, group, y + 16.0);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y:.0}\" \
         width=\"{WIDTH}\" height=\"{y:.0}\" role=\"img\">\n\
         <style>{STYLE}</style>\n{body}</svg>\n"
    )
}

/// Writes two bars per row, with the name on the left and the figures on the right. Returns the
/// vertical position below the chart.
fn bars(body: &mut String, group: &Group, mut y: f64) -> f64 {
    for line in group.lines.iter().filter(|line| !line.bars.is_empty()) {
        let _ = writeln!(
            body,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            BAR_LEFT - 8.0,
            y + BAR_HEIGHT,
            escape(&line.name)
        );
        for bar in &line.bars {
            let width = (BAR_WIDTH * bar.estimate.median / bar.full).clamp(0.0, BAR_WIDTH);
            let remark = if bar.remark.is_empty() {
                String::new()
            } else {
                format!(" · {}", escape(&bar.remark))
            };
            let _ = writeln!(
                body,
                "<rect x=\"{BAR_LEFT}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" \
                 class=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" class=\"q\">{:.0}{remark}</text>",
                BAR_HEIGHT - 1.0,
                bar.class,
                BAR_LEFT + width + 6.0,
                y + BAR_HEIGHT - 1.5,
                bar.estimate.median
            );
            y += BAR_HEIGHT;
        }
        y += 7.0;
    }
    y
}
