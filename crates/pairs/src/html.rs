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
td.none{background:none;color:inherit}td.lost{background:#a00;color:#fff}\
.legend span{display:inline-block;padding:0 .6rem;color:#111}";

/// A page that needs no other file.
pub fn html(report: &PairsReport) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>haul fleet bench</title><style>{STYLE}</style><h1>{} hosts</h1>",
        report.hosts.len()
    );
    let usual = median(report.pairs.iter().filter_map(|pair| pair.bytes_per_s)).unwrap_or(0.0);
    let items = report.findings.sentences.iter();
    let items = items.fold(String::new(), |text, one| format!("{text}<li>{}</li>", escape(one)));
    let summary = match (&items[..], report.hosts.len()) {
        ("", 0 | 1) => "<p>One host has no pair to measure.</p>".to_owned(),
        ("", _) => "<p>No host differs from the others.</p>".to_owned(),
        (items, _) => format!("<ul>{items}</ul>"),
    };
    let _ = write!(
        page,
        "{summary}<p>Rows send, columns receive, in MiB/s. The median of all pairs is {}; each \
         pair was measured for {} s on {}.</p><p class=\"legend\">",
        rate_text(usual),
        report.seconds_each,
        escape(&report.measured_at)
    );
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let percent = 100.0 * share;
        let _ = write!(page, "<span style=\"background:{}\">{percent:.0} %</span>", color(share));
    }
    page.push_str(" of the median and more</p>");
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
    let color = color(rate / usual.max(1.0));
    let trip = pair.round_trip_us.unwrap_or(0.0);
    let title = format!("{}, {trip:.0} µs there and back", rate_text(rate));
    let mib = rate / f64::from(1 << 20);
    format!("<td style=\"background:{color}\" title=\"{title}\">{mib:.0}</td>")
}

/// From red (nothing) over yellow to green (the median and more).
fn color(share: f64) -> String {
    format!("hsl({:.0} 70% 70%)", 120.0 * share.clamp(0.0, 1.0))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
