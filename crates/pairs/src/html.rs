//! The report as a page: a heat map of all pairs.

use crate::findings::{median, rate_text};
use crate::report::PairsReport;
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}\
.map{overflow-x:auto}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th{font-weight:600;padding:.3rem .6rem;text-align:right}\
td{padding:.3rem .6rem;text-align:right;color:#111;min-width:3.5rem}\
td.none{background:none;color:inherit}td.lost{background:#111;color:#fff}";

/// A page that needs no other file.
pub fn html(report: &PairsReport) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>haul fleet bench</title><style>{STYLE}</style><h1>{} hosts</h1>",
        report.hosts.len()
    );
    let usual = median(report.pairs.iter().filter_map(|pair| pair.bytes_per_s)).unwrap_or(0.0);
    let summary = if report.findings.sentences.is_empty() {
        "No host differs from the others.".to_owned()
    } else {
        let items = report.findings.sentences.iter();
        items.fold(String::new(), |text, one| format!("{text}<li>{}</li>", escape(one)))
    };
    let _ = write!(page, "<ul>{summary}</ul><p>MiB/s: rows send, columns receive.</p>");
    page.push_str("<div class=\"map\"><table><tr><th></th>");
    for host in &report.hosts {
        let _ = write!(page, "<th>{}</th>", escape(&host.name));
    }
    page.push_str("</tr>");
    for (from, host) in report.hosts.iter().enumerate() {
        let _ = write!(page, "<tr><th>{}</th>", escape(&host.name));
        for to in 0..report.hosts.len() {
            page.push_str(&cell(report, from, to, usual));
        }
        page.push_str("</tr>");
    }
    page.push_str("</table></div></html>\n");
    page
}

fn cell(report: &PairsReport, from: usize, to: usize, usual: f64) -> String {
    let Some(pair) = report.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to)) else {
        return "<td class=\"none\">–</td>".to_owned();
    };
    let Some(rate) = pair.bytes_per_s else {
        let problem = escape(pair.problem.as_deref().unwrap_or_default());
        return format!("<td class=\"lost\" title=\"{problem}\">lost</td>");
    };
    // From red (nothing) over yellow to green (the median and more).
    let hue = 120.0 * (rate / usual.max(1.0)).clamp(0.0, 1.0);
    let trip = pair.round_trip_us.unwrap_or(0.0);
    let title = format!("{}, {trip:.0} µs there and back", rate_text(rate));
    let mib = rate / f64::from(1 << 20);
    format!("<td style=\"background:hsl({hue:.0} 70% 70%)\" title=\"{title}\">{mib:.0}</td>")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
