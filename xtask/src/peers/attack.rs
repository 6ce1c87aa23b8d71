//! Measures the latency of usual clients of a server without and with a crowd that occupies its
//! connections.

use crate::peers::clients;
use crate::peers::crowd::{Behaviour, Crowd, Target};
use crate::peers::servers::RunningServer;
use haul_bench::Estimate;
use haul_lab::Lab;
use std::thread;
use std::time::{Duration, Instant};

/// The address that a crowd connects from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrowdAddress {
    /// Another one than that of the usual clients: the server's own. Its clients run on the CPU of
    /// the server.
    Own,
    /// That of the usual clients, as behind one firewall.
    Shared,
}

/// A crowd beside usual clients.
#[derive(Debug, Clone, Copy)]
pub struct Attack<'t> {
    pub behaviour: Behaviour,
    pub address: CrowdAddress,
    /// Number of clients in the crowd.
    pub connections: usize,
    /// Duration of each measurement of latency.
    pub seconds: u32,
    /// The file that the usual clients request.
    pub file: &'t str,
    /// The file that the crowd requests.
    pub large_file: &'t str,
    /// The time in which the server closes the crowd's connections.
    pub close_pause: Duration,
}

/// What one server did in all rounds.
#[derive(Debug, Default)]
struct Outcome {
    /// The 99th percentile of the latency in µs, by round.
    alone: Vec<f64>,
    beside: Vec<f64>,
    ratios: Vec<f64>,
    /// The longest time until as many new clients as there are usual ones had their answers.
    first_answers_seconds: f64,
    /// Number of clients of the crowd that the server rejected, at most.
    rejected: usize,
    /// Number of requests that usual clients had to repeat, in all rounds.
    repeated: usize,
    /// Resident memory with the crowd, at most.
    memory_bytes: u64,
}

impl Attack<'_> {
    /// Measures the servers one after another and prints a line for each.
    pub fn measure(&self, lab: &Lab, name: &str, servers: &[&RunningServer], rounds: usize) {
        println!(
            "\n{name}: p99 of usual requests in µs, alone and beside {} clients that occupy \
             connections; their ratio",
            self.connections
        );
        for server in servers {
            let mut outcome = Outcome::default();
            let mut problem = None;
            for round in 0..rounds {
                eprintln!("{name}: round {} of {rounds}: {}", round + 1, server.name);
                if let Err(error) = self.measure_round(lab, server, &mut outcome) {
                    problem = Some(error);
                    break;
                }
                thread::sleep(self.close_pause);
            }
            let problem = problem.map_or(String::new(), |problem| format!("; {problem}"));
            println!("{:<24} {}{problem}", server.name, outcome.line());
        }
    }

    fn measure_round(
        &self,
        lab: &Lab,
        server: &RunningServer,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        let target = Target {
            server: server.address,
            tls_server: server.tls_address(),
            file: self.large_file.into(),
            behaviour: self.behaviour,
        };
        let alone = self.latency(lab, server)?;
        let host = match self.address {
            CrowdAddress::Own => &lab.sender,
            CrowdAddress::Shared => &lab.receiver,
        };
        let crowd = host.run(|| Crowd::connect(target, self.connections));
        let crowd = crowd.map_err(|error| error.to_string())??;
        let started = Instant::now();
        let connect = || clients::connect(server.address, self.file, clients::USUAL);
        drop(lab.receiver.run(connect).map_err(|error| error.to_string())??);
        let first_answers_seconds = started.elapsed().as_secs_f64();
        outcome.first_answers_seconds = outcome.first_answers_seconds.max(first_answers_seconds);
        let beside = self.latency(lab, server);
        outcome.rejected = outcome.rejected.max(crowd.rejected());
        outcome.memory_bytes = outcome.memory_bytes.max(server.memory_bytes());
        let beside = beside?;
        let p99_us = |latency: clients::Latency| latency.p99.as_secs_f64() * 1e6;
        outcome.repeated += alone.repeated + beside.repeated;
        outcome.alone.push(p99_us(alone));
        outcome.beside.push(p99_us(beside));
        outcome.ratios.push(p99_us(beside) / p99_us(alone));
        Ok(())
    }

    fn latency(&self, lab: &Lab, server: &RunningServer) -> Result<clients::Latency, String> {
        let until = Instant::now() + Duration::from_secs(u64::from(self.seconds));
        let latency = || clients::latency(server.address, self.file, until);
        lab.receiver.run(latency).map_err(|error| error.to_string())?
    }
}

impl Outcome {
    fn line(&self) -> String {
        let alone = Estimate::of(&self.alone);
        let estimates = alone.zip(Estimate::of(&self.beside)).zip(Estimate::of(&self.ratios));
        let figures = estimates.map(|((alone, beside), ratio)| {
            format!(
                "{:>8.0} {:>8.0}  {:.2} ({:.2}–{:.2})",
                alone.median, beside.median, ratio.median, ratio.low, ratio.high
            )
        });
        format!(
            "{}; first answers after {:.3} s at most; {} rejected, {} requests repeated; {:.0} MiB \
             resident",
            figures.unwrap_or_else(|| "did not do it".into()),
            self.first_answers_seconds,
            self.rejected,
            self.repeated,
            self.memory_bytes as f64 / f64::from(1 << 20)
        )
    }
}
