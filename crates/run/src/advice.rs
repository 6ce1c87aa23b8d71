//! What a person can do about the bytes that were copied.

use crate::counts::{Counts, Moved};
use crate::known_programs::{self, ZeroCopySettings};
use haul::plan::{Condition, Plan, SourceKind};
use haul_tally::{SendMethod, SizeClass};
use haul_units::size_text;

/// Less than this share of the bytes is not worth a sentence.
const SHARE_MIN: f64 = 0.01;
/// Calls that move fewer bytes are small: the calls and packets cost more than the copies.
const SMALL_BYTES: u64 = 16 << 10;
/// The share of samples that must equal their file, so that "unchanged" is said of the bytes.
const EQUAL_SHARE_MIN: f64 = 0.9;

/// A change that would make the program cheaper.
#[derive(Debug, Clone, PartialEq, serde::Serialize, schemars::JsonSchema)]
pub struct Advice {
    /// What the advice is about: `sendfile`, `splice`, `small-sends`, `zerocopy-copied` or
    /// `congestion`.
    pub kind: String,
    /// The bytes that the advice is about.
    pub bytes: u64,
    /// CPU time that the change would save by the plan, in seconds. Absent if the plan cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_cpu_seconds: Option<f64>,
    /// The advice, one or two sentences.
    pub text: String,
}

/// All advice that follows from the counts, the largest saving first.
pub fn advice(counts: &Counts, plan: &Plan, is_eliding: bool) -> Vec<Advice> {
    let program = main_program(counts);
    let settings = program.and_then(known_programs::of);
    let mut found: Vec<Advice> = [
        mapped_files(counts, plan, program, settings, is_eliding),
        read_files(counts, plan, program, settings),
        forwarded(counts, program, settings),
        small_sends(counts),
        copied_zerocopy(counts),
        congestion(counts),
    ]
    .into_iter()
    .flatten()
    .collect();
    let saved = |advice: &Advice| advice.saved_cpu_seconds.unwrap_or(0.0);
    found.sort_by(|a, b| saved(b).total_cmp(&saved(a)));
    found
}

/// The name of the program that sent most bytes.
fn main_program(counts: &Counts) -> Option<&str> {
    let most = counts.processes.iter().max_by_key(|process| process.sent_bytes)?;
    (most.sent_bytes > 0).then_some(most.name.as_str())
}

fn is_worth_a_sentence(bytes: u64, counts: &Counts) -> bool {
    bytes > 0 && bytes as f64 >= SHARE_MIN * counts.sent_by_all().bytes as f64
}

/// The CPU time that `sendfile` saves of what a copying method costs, by the plan, in seconds.
fn saved_by_sendfile(
    counts: &Counts,
    plan: &Plan,
    counted: SendMethod,
    copying: haul::SendMethod,
) -> Option<f64> {
    let condition = Condition::new(SourceKind::File, true);
    let cost =
        |method| plan.costs.iter().find(|cost| cost.path == method && cost.condition == condition);
    let (copy, sendfile) = (cost(copying)?, cost(haul::SendMethod::Sendfile)?);
    let saved_us = SizeClass::all().map(|class| {
        let moved = counts.sent_in(counted, class);
        let size = moved.bytes / moved.calls.max(1);
        moved.calls as f64 * (copy.us_for(size.max(1)) - sendfile.us_for(size.max(1))).max(0.0)
    });
    Some(saved_us.sum::<f64>() / 1e6).filter(|&saved| saved > 0.0)
}

/// The sentence that names the program's own setting, or says that there is none. Empty for a
/// program that is not known.
fn own_setting(
    program: Option<&str>,
    settings: Option<ZeroCopySettings>,
    setting: fn(&ZeroCopySettings) -> Option<&'static str>,
) -> String {
    let (Some(program), Some(settings)) = (program, settings) else { return String::new() };
    match setting(&settings) {
        Some(setting) => format!(" For {program}: {setting}."),
        None => format!(" {program} does not have a setting for this."),
    }
}

fn mapped_files(
    counts: &Counts,
    plan: &Plan,
    program: Option<&str>,
    settings: Option<ZeroCopySettings>,
    is_eliding: bool,
) -> Option<Advice> {
    let moved = counts.sent(SendMethod::MappedFile);
    let without_watch = if is_eliding {
        ""
    } else {
        " haul run without --watch sends these files by sendfile. Before each call, haul run \
         checks that the memory is an unchanged mapping of the file."
    };
    is_worth_a_sentence(moved.bytes, counts).then(|| Advice {
        kind: "sendfile".into(),
        bytes: moved.bytes,
        saved_cpu_seconds: saved_by_sendfile(
            counts,
            plan,
            SendMethod::MappedFile,
            haul::SendMethod::MmapSend,
        ),
        text: format!(
            "{} were copied from mapped files; sendfile sends a file without the copy.\
             {}{without_watch}",
            size_text(moved.bytes),
            own_setting(program, settings, |settings| settings.sendfile),
        ),
    })
}

fn read_files(
    counts: &Counts,
    plan: &Plan,
    program: Option<&str>,
    settings: Option<ZeroCopySettings>,
) -> Option<Advice> {
    let moved = counts.sent(SendMethod::FileRead);
    if !is_worth_a_sentence(moved.bytes, counts) {
        return None;
    }
    let (samples, equal) = counts.samples();
    let changed = samples - equal.min(samples);
    let (evidence, is_unchanged) = if samples == 0 {
        ("; whether they were unchanged was not sampled".to_owned(), true)
    } else {
        let is_unchanged = equal as f64 >= EQUAL_SHARE_MIN * samples as f64;
        (format!(" ({equal} of {samples} samples were unchanged)"), is_unchanged)
    };
    let read = size_text(moved.bytes);
    if !is_unchanged {
        return Some(Advice {
            kind: "sendfile".into(),
            bytes: moved.bytes,
            saved_cpu_seconds: None,
            text: format!(
                "{read} were sent from memory that a file was read into. {changed} of {samples} \
                 samples differed from the file when they were sent, so sendfile cannot replace \
                 these sends."
            ),
        });
    }
    Some(Advice {
        kind: "sendfile".into(),
        bytes: moved.bytes,
        saved_cpu_seconds: saved_by_sendfile(
            counts,
            plan,
            SendMethod::FileRead,
            haul::SendMethod::ReadWrite,
        ),
        text: format!(
            "{read} were read from files and sent from the same memory{evidence}. sendfile avoids \
             both copies, from the file into the program and from the program to the socket.{}",
            own_setting(program, settings, |settings| settings.sendfile),
        ),
    })
}

fn forwarded(
    counts: &Counts,
    program: Option<&str>,
    settings: Option<ZeroCopySettings>,
) -> Option<Advice> {
    let moved = counts.sent(SendMethod::SocketRead);
    let mean = moved.bytes / moved.calls.max(1);
    is_worth_a_sentence(moved.bytes, counts).then(|| Advice {
        kind: "splice".into(),
        bytes: moved.bytes,
        saved_cpu_seconds: None,
        text: format!(
            "{} were received from a socket and sent from the same memory, {} a call. If the \
             program does not change the bytes, splice forwards them without a copy, as haul \
             proxy does; haul bench forward measures this machine.{}",
            size_text(moved.bytes),
            size_text(mean),
            own_setting(program, settings, |settings| settings.splice),
        ),
    })
}

fn small_sends(counts: &Counts) -> Option<Advice> {
    let all = counts.sent_by_all();
    let mut small = Moved::default();
    for method in SendMethod::ALL.into_iter().filter(|method| method.is_copy()) {
        for class in SizeClass::all().filter(|class| class.bytes_min() < SMALL_BYTES) {
            small.add(counts.sent_in(method, class));
        }
    }
    let mean = small.bytes / small.calls.max(1);
    let are_many = small.bytes as f64 >= 0.1 * all.bytes as f64 && small.calls >= 1000;
    are_many.then(|| Advice {
        kind: "small-sends".into(),
        bytes: small.bytes,
        saved_cpu_seconds: None,
        text: format!(
            "{} were sent in {} calls of {} on average. Each call costs as much as copying tens of \
             KiB. Larger buffers, or one writev instead of several sends, save the most.",
            size_text(small.bytes),
            small.calls,
            size_text(mean),
        ),
    })
}

fn copied_zerocopy(counts: &Counts) -> Option<Advice> {
    let (completions, copied) = counts.zerocopy_completions();
    (copied > 0).then(|| Advice {
        kind: "zerocopy-copied".into(),
        bytes: counts.sent(SendMethod::Zerocopy).bytes,
        saved_cpu_seconds: None,
        text: format!(
            "the kernel copied {copied} of {completions} sends with MSG_ZEROCOPY, which costs more \
             than a plain send. The kernel always copies such sends on loopback and veth, and \
             while tcpdump or another packet socket is open."
        ),
    })
}

fn congestion(counts: &Counts) -> Option<Advice> {
    let (_, bytes) = counts.congestion_controls().find(|&(name, _)| name == "bbr")?;
    is_worth_a_sentence(bytes, counts).then(|| Advice {
        kind: "congestion".into(),
        bytes,
        saved_cpu_seconds: None,
        text: format!(
            "{} were sent with the congestion control bbr, which sends by a timer and uses more \
             CPU time. On another machine, reno used 0.65 times the CPU time of bbr (0.60 to \
             0.70). reno can be slower over long paths and paths with loss. To compare: haul bench \
             settings --settings congestion. To change: haul run --congestion reno -- COMMAND.",
            size_text(bytes),
        ),
    })
}
