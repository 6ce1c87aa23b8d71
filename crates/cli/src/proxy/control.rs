//! `haul proxy control`: sends a command to the control socket of a running proxy.

use crate::daemon;
use crate::output::Failure;
use clap::Args;
use haul_proxy::{ConnectionStatus, ControlResponse, ProcessStatus, ReloadStatus, UpstreamStatus};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
#[command(after_help = "\
Commands:
  connections                 list the open connections
  upstreams                   list the upstreams
  status                      show the version, the listeners, the latest reload
  reload                      read the configuration file again, and put it in force
  check                       tell what reload would, and change nothing
  drain UPSTREAM [TIME]       connect no client to it; after TIME, close its connections
  disable UPSTREAM            connect no client to it, and close its connections
  enable UPSTREAM             connect clients to it again
  weight UPSTREAM N|default   set its share of the clients
  kill ID                     close the connection with this number
  kill upstream UPSTREAM      close all connections to it
  kill client NETWORK         close all connections of these clients

UPSTREAM is an address as configured, or GROUP/ADDRESS. Connections are closed by a reset.")]
pub struct ControlArguments {
    /// Path of the proxy's control socket (haul proxy --control)
    pub socket: PathBuf,
    /// The command, see below
    #[arg(required = true)]
    pub command: Vec<String>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &ControlArguments) -> Result<ExitCode, Failure> {
    let ControlArguments { socket, command, json } = arguments;
    let (answer, response) = daemon::control::command("haul proxy", socket, &command.join(" "))?;
    let text = if *json { answer } else { text(&response) };
    // A reader that closes the pipe (`| head`) needs no more.
    let _ = io::stdout().write_all(text.as_bytes());
    match response {
        ControlResponse::Error(error) => Err(Failure::failed(error)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn text(response: &ControlResponse) -> String {
    match response {
        ControlResponse::Connections(connections) => table(
            &[
                "ID",
                "CLIENT",
                "LISTENER",
                "UPSTREAM",
                "PHASE",
                "AGE",
                "LOOP",
                "TO UPSTREAM",
                "TO CLIENT",
                "SPLICED",
            ],
            connections.iter().map(connection_row),
        ),
        ControlResponse::Upstreams(upstreams) | ControlResponse::Changed(upstreams) => table(
            &[
                "GROUP",
                "UPSTREAM",
                "STATE",
                "WEIGHT",
                "OPEN",
                "MOST",
                "CONNECTED",
                "FAILED",
                "CHECK",
            ],
            upstreams.iter().map(upstream_row),
        ),
        ControlResponse::Status(status) => status_text(status),
        ControlResponse::Reloaded(caveats) => {
            with_warnings("the configuration was reloaded", caveats)
        }
        ControlResponse::Checked(caveats) => with_warnings("the file can be reloaded", caveats),
        ControlResponse::Killed(1) => "1 connection closed\n".into(),
        ControlResponse::Killed(count) => format!("{count} connections closed\n"),
        _ => String::new(),
    }
}

fn with_warnings(result: &str, caveats: &[String]) -> String {
    let warnings = caveats.iter().map(|caveat| format!("warning: {caveat}\n"));
    format!("{result}\n{}", warnings.collect::<String>())
}

fn status_text(status: &ProcessStatus) -> String {
    let uptime = time(status.uptime_seconds);
    let reload = match &status.reload {
        None => "none since the start".to_owned(),
        Some(ReloadStatus { time, error: None, warnings, .. }) => {
            let warnings = warnings.iter().map(|warning| format!(" (warning: {warning})"));
            format!("{time}, in force{}", warnings.collect::<String>())
        }
        Some(ReloadStatus { time, error: Some(error), .. }) => format!("{time}, failed: {error}"),
    };
    let plural = if status.loops == 1 { "" } else { "s" };
    let ending = if status.is_ending { ", ending" } else { "" };
    let predecessor = if status.has_predecessor { ", the old one has not ended" } else { "" };
    let lines = [
        ("version", status.version.clone()),
        (
            "process",
            format!("{}, for {uptime} (since {}){ending}{predecessor}", status.pid, status.started),
        ),
        (
            "connections",
            format!(
                "{} of {}, on {} loop{plural}",
                status.connections, status.connections_max, status.loops
            ),
        ),
        ("file", status.config_file.clone().unwrap_or_else(|| "none".into())),
        ("reload", reload),
    ];
    let lines = lines.map(|(name, text)| format!("{name:<13}{text}\n"));
    let listeners = table(
        &["LISTENER", "GROUPS", "ACCEPTED"],
        status.listeners.iter().map(|listener| {
            vec![listener.address.clone(), listener.groups.join(","), listener.accepted.to_string()]
        }),
    );
    format!("{}\n{listeners}", lines.concat())
}

/// A time by its two largest units, such as `3d 4h` or `5min 2s`.
fn time(seconds: u64) -> String {
    let units = [("d", seconds / 86400), ("h", seconds / 3600 % 24), ("min", seconds / 60 % 60)];
    let units = units.into_iter().chain([("s", seconds % 60)]);
    let counted: Vec<_> = units.skip_while(|(_, count)| *count == 0).take(2).collect();
    let texts = counted.iter().map(|(unit, count)| format!("{count}{unit}"));
    if counted.is_empty() { "0s".into() } else { texts.collect::<Vec<_>>().join(" ") }
}

fn connection_row(connection: &ConnectionStatus) -> Vec<String> {
    let of_any = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let bytes = |direction: &haul_proxy::DirectionBytes| {
        direction.spliced_bytes.saturating_add(direction.copied_bytes)
    };
    let (to_upstream, to_client) =
        (bytes(&connection.traffic.to_upstream), bytes(&connection.traffic.to_client));
    let spliced =
        connection.traffic.to_upstream.spliced_bytes + connection.traffic.to_client.spliced_bytes;
    let percent = (100 * u128::from(spliced)).checked_div(u128::from(to_upstream + to_client));
    vec![
        connection.id.to_string(),
        of_any(connection.parties.client.map(|client| client.to_string())),
        connection.parties.listener.to_string(),
        of_any(connection.parties.upstream.as_ref().map(ToString::to_string)),
        connection.phase.name().into(),
        format!("{:.1}s", connection.age_ms / 1e3),
        format!("{:.1}ms", connection.loop_time.total.as_secs_f64() * 1e3),
        to_upstream.to_string(),
        to_client.to_string(),
        of_any(percent.map(|percent| format!("{percent}%"))),
    ]
}

fn upstream_row(upstream: &UpstreamStatus) -> Vec<String> {
    let check = match &upstream.check {
        None => "-".into(),
        Some(check) => check.error.clone().unwrap_or_else(|| "ok".into()),
    };
    let mut states = vec![upstream.administration.name().to_owned()];
    states.extend((!upstream.is_up).then(|| "down".to_owned()));
    let closing_in_ms = upstream.closing_in_ms.filter(|left| *left > 0);
    states.extend(closing_in_ms.map(|left| format!("closing in {}", time(left.div_ceil(1000)))));
    states.extend((upstream.addresses == Some(0)).then(|| "unresolved".to_owned()));
    states.extend(upstream.is_ejected.then(|| "ejected".to_owned()));
    states.extend(upstream.share.is_backup.then(|| "backup".to_owned()));
    let weight = match upstream.share.configured_weight {
        None => upstream.share.weight.to_string(),
        Some(configured) => format!("{} (configured {configured})", upstream.share.weight),
    };
    vec![
        upstream.group.clone(),
        upstream.upstream.clone(),
        states.join(","),
        weight,
        upstream.counts.open_connections.to_string(),
        upstream.share.connections_max.map_or_else(|| "-".into(), |maximum| maximum.to_string()),
        upstream.counts.connected.to_string(),
        upstream.counts.failed.to_string(),
        check,
    ]
}

/// Aligns columns, with two spaces between them.
fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = width(column).unwrap_or_default();
            format!("{cell:<width$}")
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_two_units() {
        for (seconds, text) in
            [(0, "0s"), (59, "59s"), (300, "5min 0s"), (86399, "23h 59min"), (90061, "1d 1h")]
        {
            assert_eq!(time(seconds), text);
        }
    }

    #[test]
    fn an_operators_changes_are_shown() {
        let status = |changes: serde_json::Value| {
            let mut status = serde_json::json!({
                "group": "web", "upstream": "10.0.0.5:80", "administration": "draining",
                "is_up": true, "is_ejected": false, "is_backup": false, "weight": 7,
                "open_connections": 1, "connected": 2, "failed": 0
            });
            status.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            upstream_row(&serde_json::from_value(status).unwrap())[2..4].join("|")
        };
        let changes = serde_json::json!({"configured_weight": 3, "closing_in_ms": 598_001});
        assert_eq!(status(changes), "draining,closing in 9min 59s|7 (configured 3)");
        assert_eq!(status(serde_json::json!({"closing_in_ms": 0})), "draining|7");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["1".to_owned(), "b".to_owned()], vec!["100".to_owned(), String::new()]];
        assert_eq!(table(&["ID", "X"], rows.into_iter()), "ID   X\n1    b\n100\n");
    }
}
