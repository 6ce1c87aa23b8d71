//! `haul fleet bench`: measures every pair of hosts of the job.

use super::joined::{self, CONNECT_TIME_MAX, Joined, in_rank};
use crate::output::{self, Destination, Failure};
use clap::Args;
use haul_bench::export;
use haul_fleet::Announcement;
use haul_pairs::{Member, PairsReport, html, measure_all, serve, text};
use haul_transfer::{ControlListener, ControlStreams};
use haul_units::ParseQuantityError;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// The time without an order after which rank 0 is lost: the measurements of other pairs take less.
const SILENCE_MAX: Duration = Duration::from_secs(600);
/// The time that a reply may take longer than the measurement.
const REPLY_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub struct FleetBenchArguments {
    /// Time of each measurement: each pair is measured in both directions
    #[arg(long = "for", value_name = "TIME", value_parser = time, default_value = "1s")]
    time: Duration,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<Destination>,
    /// Write the report as an HTML page; - is standard output
    #[arg(long, value_name = "FILE")]
    html: Option<Destination>,
}

/// Runs `haul fleet bench`.
pub fn run(arguments: &FleetBenchArguments, is_insecure: bool) -> Result<ExitCode, Failure> {
    match joined::join(0..=0, is_insecure)? {
        Joined::Zero { ranks, members, listener } => {
            let keys: Vec<_> = members.iter().map(|&rank| ranks[rank].key.clone()).collect();
            let mut destinations = [&arguments.json, &arguments.html].into_iter().flatten();
            if let Err(failure) = destinations.try_for_each(Destination::check) {
                // The other ranks end when their connections do.
                drop(listener.accept_all(&keys, REPLY_TIME_MAX));
                return Err(failure);
            }
            let report = measure(arguments.time, &ranks, &members, listener)?;
            print(arguments, &report)?;
        }
        Joined::Other { rank, streams } => {
            let ControlStreams { mut from, to, .. } = streams;
            let served = from.set_silence_max(SILENCE_MAX, SILENCE_MAX);
            served.and_then(|()| serve(from, to)).map_err(|error| in_rank(rank, error))?;
        }
        Joined::Nothing => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures as rank 0.
fn measure(
    time: Duration,
    ranks: &[Announcement],
    members: &[usize],
    listener: ControlListener,
) -> Result<PairsReport, Failure> {
    let keys: Vec<_> = members.iter().map(|&rank| ranks[rank].key.clone()).collect();
    let streams = listener.accept_all(&keys, CONNECT_TIME_MAX).map_err(Failure::failed)?;
    let (own, theirs) = UnixStream::pair().map_err(Failure::failed)?;
    let own_from = own.try_clone().map_err(Failure::failed)?;
    // The thread ends when the measurement closes the streams.
    thread::spawn(move || serve(&theirs, &theirs));
    let mut all = vec![Member {
        announcement: ranks[0].clone(),
        streams: Some((Box::new(own_from), Box::new(own))),
    }];
    for (&rank, streams) in members.iter().zip(streams) {
        let streams = streams.map(|ControlStreams { mut from, to, .. }| {
            let limit = time + REPLY_TIME_MAX;
            from.set_silence_max(limit, limit)
                .map(|()| (Box::new(from) as Box<dyn Read + Send>, to))
        });
        let streams = streams.transpose().map_err(Failure::failed)?;
        all.push(Member { announcement: ranks[rank].clone(), streams });
    }
    let progress = |round, rounds| eprintln!("haul: round {round} of {rounds}");
    Ok(measure_all(all, time, progress))
}

fn print(arguments: &FleetBenchArguments, report: &PairsReport) -> Result<(), Failure> {
    let outputs = [&arguments.json, &arguments.html];
    if !outputs.contains(&&Some(Destination::StandardOutput)) {
        output::print(&text(report))?;
    }
    if let Some(json) = &arguments.json {
        json.write(&export::json(report))?;
    }
    if let Some(page) = &arguments.html {
        page.write(&html(report))?;
    }
    Ok(())
}

/// Parses the time of a measurement.
fn time(text: &str) -> Result<Duration, ParseQuantityError> {
    const MINUTE: Duration = Duration::from_secs(60);
    haul_units::parse_time(text, Duration::from_millis(100)..=MINUTE)
}
