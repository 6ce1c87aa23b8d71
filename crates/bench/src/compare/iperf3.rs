//! Reads a report of `iperf3 --json` as a run of two rows, the sender and the receiver.
//!
//! The cost is iperf3's CPU utilization: the time that the kernel charged to the process, divided
//! by the wall time. The work of interrupts is charged to whichever program an interrupt stops, so
//! the cost contains a part of this work, or nothing of it.

use super::run_reports::{RunReports, is_cost};
use super::{MeasuredRow, Side};
use crate::host::HostFacts;
use crate::warning::{Kind, Warning};
use haul_units::{MIB, Rate, size_text};
use serde::Deserialize;
use serde_json::Value;

const EXPERIMENT: &str = "iperf3";
/// The CPU time, in µs, of one percent of a CPU for a second.
const US_PER_PERCENT_SECOND: f64 = 1e4;

/// The parts of a report that are read, as iperf3 3.12 names them.
#[derive(Deserialize)]
struct Report {
    start: Start,
    end: Option<Value>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Start {
    version: String,
    #[serde(default)]
    system_info: String,
    timestamp: Option<Timestamp>,
    #[serde(default)]
    tcp_mss_default: u64,
    #[serde(default)]
    sock_bufsize: u64,
    /// A server's report has it, a client's has not.
    accepted_connection: Option<Value>,
    #[serde(rename = "test_start")]
    test: Option<TestStart>,
}

#[derive(Deserialize)]
struct Timestamp {
    timesecs: i64,
}

#[derive(Deserialize)]
struct TestStart {
    protocol: String,
    num_streams: u64,
    blksize: u64,
    #[serde(default)]
    reverse: u64,
    #[serde(default)]
    target_bitrate: u64,
    #[serde(default)]
    omit: u64,
}

#[derive(Deserialize)]
struct End {
    sum_sent: Sum,
    sum_received: Sum,
    sum_sent_bidir_reverse: Option<Value>,
    cpu_utilization_percent: Utilization,
    sender_tcp_congestion: Option<String>,
}

#[derive(Deserialize)]
struct Sum {
    bytes: u64,
    seconds: f64,
}

#[derive(Deserialize)]
struct Utilization {
    host_total: f64,
    remote_total: f64,
}

/// Whether a JSON value looks like a report of iperf3.
pub(super) fn is_report(report: &Value) -> bool {
    let version = report["start"]["version"].as_str();
    version.is_some_and(|version| version.starts_with("iperf 3"))
}

/// Whether a JSON value is a line of `iperf3 --json-stream`, which has the parts of a report.
pub(super) fn is_stream(report: &Value) -> bool {
    report["event"].is_string() && !report["data"].is_null()
}

/// Reads one report of a client.
pub(super) fn read(report: Value, name: &str) -> Result<RunReports, String> {
    let Report { start, end, error } =
        serde_json::from_value(report).map_err(|error| error.to_string())?;
    if start.accepted_connection.is_some() {
        return Err("a server of iperf3 wrote it; the report of the client has both hosts".into());
    }
    let mut run = RunReports {
        side: side(&start, name),
        labs: Vec::new(),
        conditions: Vec::new(),
        obstacles: Vec::new(),
        unmeasured: Vec::new(),
        warnings: vec![Warning::new(
            Kind::AccountsDisagree,
            "the costs of iperf3 are the CPU time that the kernel charged to the process, so most \
             work of interrupts is not part of them; haul bench --to HOST measures all of it",
        )],
        rows: Vec::new(),
    };
    if let Some(error) = error {
        run.unmeasured.push((EXPERIMENT.into(), error));
        return Ok(run);
    }
    let test = start.test.ok_or("the test did not start")?;
    let end = end.ok_or("the test did not end")?;
    if end["sum_sent"].is_null() || end["sum_received"].is_null() {
        return Err("it lacks the totals of both hosts: measure with iperf3 3.12 or later".into());
    }
    let end: End = serde_json::from_value(end).map_err(|error| format!("end: {error}"))?;
    if end.sum_sent_bidir_reverse.is_some() {
        return Err("the test ran with --bidir, so its CPU times are of both directions".into());
    }
    run.conditions = vec![
        ("version", start.version),
        ("congestion control", end.sender_tcp_congestion.unwrap_or_else(|| "unknown".into())),
        ("MSS", start.tcp_mss_default.to_string()),
        ("socket buffer in bytes (-w)", start.sock_bufsize.to_string()),
        ("seconds left out (--omit)", test.omit.to_string()),
        ("direction", if test.reverse == 0 { "from the client" } else { "to the client" }.into()),
    ];
    let group = group(&test);
    let Utilization { host_total, remote_total } = end.cpu_utilization_percent;
    let [sender, receiver] =
        if test.reverse == 0 { [host_total, remote_total] } else { [remote_total, host_total] };
    for (row, percent, sum) in
        [("sender", sender, end.sum_sent), ("receiver", receiver, end.sum_received)]
    {
        let us_per_mib = percent * sum.seconds * US_PER_PERCENT_SECOND / (sum.bytes as f64 / MIB);
        if is_cost(us_per_mib) && percent > 0.0 {
            run.rows.push(MeasuredRow::of_program(EXPERIMENT, &group, row, us_per_mib));
        } else {
            let reason = "iperf3 has no CPU time or no bytes of this host".into();
            run.unmeasured.push((format!("{EXPERIMENT} {row}"), reason));
        }
    }
    Ok(run)
}

/// The conditions without which two tests are not the same test.
fn group(test: &TestStart) -> String {
    let TestStart { protocol, num_streams, blksize, target_bitrate, .. } = test;
    let connections = if *num_streams == 1 { "connection" } else { "connections" };
    let rate = match target_bitrate {
        0 => String::new(),
        rate => format!(", at {}", Rate(*rate)),
    };
    format!(
        "{protocol}, {num_streams} {connections}, blocks of {}{rate}, µs/MiB",
        size_text(*blksize)
    )
}

fn side(start: &Start, name: &str) -> Side {
    // Such as: Linux web1 6.12.48 #1 SMP PREEMPT_DYNAMIC x86_64.
    let mut words = start.system_info.split_whitespace().skip(1);
    let mut word = || words.next().unwrap_or("unknown").to_owned();
    let host = HostFacts::without_cpu(word(), word());
    let second = start.timestamp.as_ref().map(|timestamp| timestamp.timesecs);
    let second = second.and_then(|second| jiff::Timestamp::from_second(second).ok());
    Side {
        name: name.into(),
        started: second.map_or(String::new(), |second| second.to_string()),
        haul: String::new(),
        commit: String::new(),
        command: Vec::new(),
        host,
        lab: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A report of iperf3 3.12 without the parts that are not read.
    fn report() -> Value {
        json!({
            "start": {
                "version": "iperf 3.12",
                "system_info": "Linux web1 6.12.48 #1 SMP PREEMPT_DYNAMIC x86_64",
                "timestamp": {"time": "Mon, 30 Nov 2026 23:52:00 GMT", "timesecs": 1_796_082_720},
                "tcp_mss_default": 1448,
                "test_start": {
                    "protocol": "TCP", "num_streams": 1, "blksize": 131_072, "reverse": 0,
                    "target_bitrate": 0
                },
            },
            "end": {
                "sum_sent": {"seconds": 2.0, "bytes": 2048_u64 << 20},
                "sum_received": {"seconds": 2.0, "bytes": 1024_u64 << 20},
                "cpu_utilization_percent": {"host_total": 50.0, "remote_total": 100.0},
                "sender_tcp_congestion": "cubic",
            },
        })
    }

    fn costs(report: Value) -> Vec<(String, Vec<f64>)> {
        let run = read(report, "a.json").unwrap();
        run.rows.into_iter().map(|row| (row.name, row.costs)).collect()
    }

    #[test]
    fn a_cost_is_the_cpu_time_of_a_mib() {
        let expected = [("sender", 1e6 / 2048.0), ("receiver", 2e6 / 1024.0)];
        let expected = expected.map(|(name, cost)| (name.to_owned(), vec![cost]));
        assert_eq!(costs(report()), expected);
    }

    #[test]
    fn the_client_of_a_reverse_test_receives() {
        let mut reverse = report();
        reverse["start"]["test_start"]["reverse"] = 1.into();
        let expected = [("sender", 2e6 / 2048.0), ("receiver", 1e6 / 1024.0)];
        assert_eq!(costs(reverse), expected.map(|(name, cost)| (name.to_owned(), vec![cost])));
    }

    #[test]
    fn the_host_is_named_and_its_cpu_is_unknown() {
        let side = read(report(), "a.json").unwrap().side;
        assert_eq!((side.host.name.as_str(), side.host.kernel.as_str()), ("web1", "6.12.48"));
        assert_eq!(side.started, "2026-11-30T23:52:00Z");
        assert_eq!(side.host.cpu, "unknown");
    }

    #[test]
    fn a_failed_test_has_the_reason() {
        let mut failed = report();
        failed["error"] = "unable to connect to server".into();
        let run = read(failed, "a.json").unwrap();
        assert!(run.rows.is_empty());
        assert_eq!(run.unmeasured[0].1, "unable to connect to server");
    }

    #[test]
    fn a_report_whose_costs_are_not_of_one_direction_is_refused() {
        let mut both = report();
        both["end"]["sum_sent_bidir_reverse"] = json!({});
        assert!(read(both, "a.json").unwrap_err().contains("--bidir"));
        let mut server = report();
        server["start"]["accepted_connection"] = json!({});
        assert!(read(server, "a.json").unwrap_err().contains("server"));
    }

    #[test]
    fn a_host_without_cpu_time_has_no_row() {
        let mut old = report();
        old["end"]["cpu_utilization_percent"]["remote_total"] = 0.into();
        let run = read(old, "a.json").unwrap();
        assert_eq!(run.rows.len(), 1);
        assert_eq!(run.unmeasured[0].0, "iperf3 receiver");
    }
}
