//! A summary as text for a terminal, as Markdown and as HTML.

use super::escape::{html as escape_html, markdown as escape_markdown};
use crate::summary::Summary;
use crate::verdict::{Confidence, Question, Safety, Verdict};
use std::fmt::Write;

/// The lines of the smallest terminal.
const LINES_MAX: usize = 24;
/// The meaning of the figures.
const LEGEND: &str = "(a to b): interval of 95 %. certain: jointly for all methods, or reported by \
                      the kernel; likely: for this method alone.";
/// The meaning of the confidences, in one line of the smallest terminal.
const SHORT_LEGEND: &str =
    "certain: 95 % for all rows jointly, or counted by the kernel; likely: for one.";
/// The columns of the question and of the confidence.
const TITLE_COLUMNS: usize = 12;
const CONFIDENCE_COLUMNS: usize = 10;

/// Renders the summary for a terminal of `width` columns, with colours if `has_colour`. It fits 24
/// lines of 80 columns.
pub fn terminal(summary: &Summary, width: u16, has_colour: bool) -> String {
    let width = usize::from(width.clamp(60, 100));
    let with_how = render(summary, width, has_colour, |_| true);
    let legend = textwrap::fill(SHORT_LEGEND, wrapping(width)) + "\n";
    // The caller adds a line with the path of the report.
    if with_how.lines().count() + legend.lines().count() < LINES_MAX {
        return with_how + &legend;
    }
    if with_how.lines().count() < LINES_MAX {
        return with_how;
    }
    // The way to decide an open question is the same for all of them.
    let decided = render(summary, width, has_colour, |verdict| verdict.choice.is_some());
    if decided.lines().count() < LINES_MAX {
        return decided;
    }
    render(summary, width, has_colour, |_| false)
}

fn render(
    summary: &Summary,
    width: usize,
    has_colour: bool,
    has_how: impl Fn(&Verdict) -> bool,
) -> String {
    let mut text = textwrap::fill(&summary.place(), wrapping(width)) + "\n";
    for verdict in summary.verdicts.iter().filter(|verdict| is_in_terminal(verdict.question)) {
        text.push_str(&verdict_lines(verdict, width, has_colour, has_how(verdict)));
    }
    for left_out in &summary.left_out {
        let line = format!("{} was left out: {}", left_out.experiment, left_out.reason);
        let options = wrapping(width).subsequent_indent("  ");
        let _ = writeln!(text, "{}", textwrap::fill(&line, options));
    }
    text.push_str(&(textwrap::fill(&summary.noise_line(), wrapping(width)) + "\n"));
    text
}

/// Wraps lines without splitting words at hyphens, which flags and dates contain.
fn wrapping(width: usize) -> textwrap::Options<'static> {
    textwrap::Options::new(width).word_splitter(textwrap::WordSplitter::NoHyphenation)
}

/// Whether a question is in the summary of the terminal. The others are in the report.
fn is_in_terminal(question: Question) -> bool {
    !matches!(question, Question::Packets | Question::Checksums)
}

/// One verdict: the question, the confidence, the statement, and the command or line of code.
pub fn verdict_lines(verdict: &Verdict, width: usize, has_colour: bool, has_how: bool) -> String {
    let head = format!(
        "{:TITLE_COLUMNS$}{:CONFIDENCE_COLUMNS$}",
        verdict.question.title(),
        verdict.confidence.name()
    );
    let indent = " ".repeat(TITLE_COLUMNS + CONFIDENCE_COLUMNS);
    let options = wrapping(width).initial_indent(&head).subsequent_indent(&indent);
    let mut text = textwrap::fill(&verdict.statement, options) + "\n";
    if let Some(how) = verdict.how.as_ref().filter(|how| has_how && !how.is_empty()) {
        let first = format!("{indent}how: ");
        let rest = format!("{indent}     ");
        let options = wrapping(width).initial_indent(&first).subsequent_indent(&rest);
        text.push_str(&(textwrap::fill(how, options) + "\n"));
    }
    if has_colour {
        text = text.replacen(
            verdict.confidence.name(),
            &format!("{}{}\x1b[0m", colour(verdict.confidence), verdict.confidence.name()),
            1,
        );
    }
    text
}

/// The escape sequence of a confidence: green, yellow, or dim.
fn colour(confidence: Confidence) -> &'static str {
    match confidence {
        Confidence::Certain => "\x1b[32m",
        Confidence::Likely => "\x1b[33m",
        Confidence::Undecided => "\x1b[2m",
    }
}

/// Renders the summary as Markdown.
pub fn markdown(summary: &Summary) -> String {
    let mut text = format!("# Summary\n\n{}\n\n", escape_markdown(&summary.place()));
    text.push_str("| question | confidence | verdict | how |\n|---|---|---|---|\n");
    for verdict in &summary.verdicts {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            verdict.question.title(),
            verdict.confidence.name(),
            escape_markdown(&verdict.statement),
            escape_markdown(verdict.how.as_deref().unwrap_or_default())
        );
    }
    let _ =
        writeln!(text, "\n{}. {}", escape_markdown(&summary.noise_line()), escape_markdown(LEGEND));
    for left_out in &summary.left_out {
        let line = format!("{} was left out: {}", left_out.experiment, left_out.reason);
        let _ = writeln!(text, "\n{}", escape_markdown(&line));
    }
    text.push('\n');
    text
}

/// Renders the summary as a section of a page.
pub fn html(summary: &Summary) -> String {
    let mut text = String::from("<section class=\"summary\">\n<h2>Summary</h2>\n");
    let _ = writeln!(text, "<p class=\"setting\">{}</p>", escape_html(&summary.place()));
    text.push_str("<dl>\n");
    for verdict in &summary.verdicts {
        text.push_str(&verdict_html(verdict));
    }
    text.push_str("</dl>\n");
    let noise = escape_html(&summary.noise_line());
    let _ = writeln!(text, "<p class=\"legend\">{noise}. {}</p>", escape_html(LEGEND));
    for left_out in &summary.left_out {
        let _ = writeln!(
            text,
            "<p class=\"setting\">{} was left out: {}</p>",
            escape_html(&left_out.experiment),
            escape_html(&left_out.reason)
        );
    }
    text.push_str("</section>\n");
    text
}

/// One verdict as a term and its description.
pub fn verdict_html(verdict: &Verdict) -> String {
    let confidence = verdict.confidence.name();
    let how = verdict.how.as_ref().filter(|how| !how.is_empty());
    let how =
        how.map_or(String::new(), |how| format!("<pre><code>{}</code></pre>", escape_html(how)));
    let safety = match verdict.safety {
        Safety::SafeAnywhere => String::new(),
        safety => {
            let (name, class) = (safety.name(), safety.name().replace(' ', "-"));
            format!(" <span class=\"badge {class}\">{name}</span>")
        }
    };
    format!(
        "<dt>{} <span class=\"badge {confidence}\">{confidence}</span>{safety}</dt>\n\
         <dd>{}{how}</dd>\n",
        verdict.question.title(),
        escape_html(&verdict.statement)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::LabFacts;
    use crate::rounds::Noise;
    use crate::summary::LeftOut;

    /// A summary whose verdicts are as long as they can be.
    fn long_summary() -> Summary {
        let mut summary = Summary::start();
        let long = |question, confidence| Verdict {
            confidence,
            how: Some("sysctl -w net.ipv4.tcp_congestion_control=cubic".into()),
            choice: (confidence != Confidence::Undecided).then(|| "cubic".into()),
            ..Verdict::without_saving(
                question,
                "On loopback (no network): congestion cubic saves 63 % (50 to 70) of both hosts' \
                 CPU with sendfile; LAN only: over long or lossy paths it is slower than bbr",
            )
        };
        summary.verdicts = [
            (Question::SendFiles, Confidence::Certain),
            (Question::SendMemory, Confidence::Likely),
            (Question::Receive, Confidence::Undecided),
            (Question::Forward, Confidence::Undecided),
            (Question::Settings, Confidence::Certain),
            (Question::CpuTime, Confidence::Certain),
            (Question::Packets, Confidence::Certain),
        ]
        .map(|(question, confidence)| long(question, confidence))
        .into();
        summary.left_out.push(LeftOut {
            experiment: "profile".into(),
            reason: "the kernel does not allow this user to sample CPUs: run as root".into(),
        });
        summary
    }

    #[test]
    fn the_terminal_form_fits_24_lines_of_80_columns() {
        let text = terminal(&long_summary(), 80, false);
        assert!(text.lines().count() < LINES_MAX, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for question in ["send files", "send memory", "receive", "forward", "settings", "CPU time"]
        {
            assert!(text.contains(question), "{question}: {text}");
        }
        assert!(!text.contains('\x1b'));
    }

    /// A summary without verdicts, of a host whose facts are as long as usual.
    fn summary_of_usual_host() -> Summary {
        let mut summary = Summary::start();
        summary.host.name = "storage7".into();
        summary.host.kernel = "6.18.44-amd64".into();
        summary.host.cpu = "Intel(R) Xeon(R) Processor".into();
        summary.host.cpus = 32;
        summary.lab = Some(LabFacts {
            kind: "veth".into(),
            mtu: 9000,
            congestion: "cubic".into(),
            rate_bits_per_second: None,
            reading: None,
            sender_cpu: Some(0),
            receiver_cpu: Some(1),
            peer: None,
            cache_line_round_trip_ns: None,
        });
        summary.default_congestion = Some("bbr".into());
        summary
    }

    /// The verdicts of a run on a quiet machine, with noise near its bounds.
    #[test]
    fn a_usual_summary_fits_with_its_commands_and_its_legend() {
        use Question::{CpuTime, Forward, Receive, SendFiles, SendMemory, Settings};
        let mut summary = summary_of_usual_host();
        summary.noise = Noise {
            steal_percent: 9.0,
            drift_percent: 20.0,
            disturbed_percent: 49.0,
            invalid: None,
        };
        summary.warning_count = 50;
        let verdict = |(question, statement, how): (Question, &str, &str)| Verdict {
            how: Some(how.into()),
            choice: Some("choice".into()),
            ..Verdict::without_saving(question, statement)
        };
        summary.verdicts = [
            (
                SendFiles,
                "sendfile saves 59 % (52 to 66) of the sender's CPU against read+write; no \
                 difference between it and splice was shown",
                "sendfile(2); in Rust haul::Sender::send_file",
            ),
            (SendMemory, &crate::loan::copied_statement(100.0), crate::loan::REAL_CARD),
            (
                Receive,
                &crate::receive::unmapped_statement(89.0, 4148),
                "read(2); in Rust haul::Receiver, which maps if it can",
            ),
            (
                Forward,
                "splice saves 52 % (41 to 62) of the proxy's CPU against copy; with messages of \
                 64B no difference was shown",
                "splice(2) through a pipe; in Rust haul::Forwarder",
            ),
            (
                Settings,
                "congestion cubic saves 81 % (77 to 84) of both hosts' CPU against bbr (sendfile, \
                 MTU 1500); LAN only: over long or lossy paths it is slower than bbr",
                "sysctl -w net.ipv4.tcp_congestion_control=cubic",
            ),
            (
                CpuTime,
                "sending host, sendfile: softirq and interrupt 58 %, files and pipes 12 %; \
                 receiving host, read: softirq and interrupt 49 %, copy 37 %",
                "haul bench profile -- COMMAND (your own program)",
            ),
        ]
        .map(verdict)
        .into();
        let text = terminal(&summary, 80, false);
        assert!(text.lines().count() < LINES_MAX, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("how: ").count(), summary.verdicts.len(), "{text}");
        assert!(text.ends_with(&format!("{SHORT_LEGEND}\n")), "{text}");
    }

    #[test]
    fn colours_mark_the_confidence_only() {
        let summary = long_summary();
        let text = terminal(&summary, 80, true);
        assert!(text.contains("\x1b[32mcertain\x1b[0m"), "{text}");
        let plain = text
            .replace("\x1b[32m", "")
            .replace("\x1b[33m", "")
            .replace("\x1b[2m", "")
            .replace("\x1b[0m", "");
        assert_eq!(plain, terminal(&summary, 80, false));
    }

    #[test]
    fn text_in_a_page_is_escaped() {
        let verdict = Verdict {
            how: Some("a < b".into()),
            ..Verdict::without_saving(Question::Receive, "<script>")
        };
        let html = verdict_html(&verdict);
        assert!(html.contains("&lt;script&gt;") && html.contains("a &lt; b"), "{html}");
    }
}
