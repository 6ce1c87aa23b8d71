//! `cargo xtask peers serve`: compares the cost of file servers with that of haul.
//!
//! All servers run in one lab and are measured by the same meter, in interleaved rounds.

use crate::peers::LabArguments;
use crate::peers::attack::CrowdAddress;
use crate::peers::crowd::Behaviour;
use crate::peers::servers::{ServerKind, Service, Setup, Starter, make_certificate};
use crate::peers::slowhttptest::Mode;
use crate::peers::trial::{
    Comparison, FEW, IDLE, Load, MANY, MANY_BULK, ONE_BULK, SLOW, Trial, attack, copy_program,
};
use std::iter;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Port of the first server. Each further server listens on the next port.
const FIRST_PORT: u16 = 8001;

/// All trials, in the order of their execution.
pub const TRIALS: [Trial; 23] = [
    Trial { name: "256MiB", file: "256MiB", load: ONE_BULK, service: Service::Plain },
    Trial { name: "256MiB-64", file: "256MiB", load: MANY_BULK, service: Service::Plain },
    Trial { name: "256MiB-new", file: "published", load: Load::Published, service: Service::Plain },
    Trial { name: "1MiB", file: "1MiB", load: FEW, service: Service::Plain },
    Trial { name: "64KiB", file: "64KiB", load: FEW, service: Service::Plain },
    Trial { name: "4KiB", file: "4KiB", load: FEW, service: Service::Plain },
    Trial { name: "4KiB-logged", file: "4KiB", load: FEW, service: Service::Logged },
    Trial { name: "4KiB-10000", file: "4KiB", load: MANY, service: Service::Plain },
    Trial { name: "https-1MiB", file: "1MiB", load: FEW, service: Service::Tls },
    Trial { name: "idle-10000", file: "4KiB", load: IDLE, service: Service::Plain },
    Trial { name: "slow-10000", file: "4KiB", load: SLOW, service: Service::Plain },
    attack_trial("half-heads", Behaviour::HalfHeads, CrowdAddress::Own),
    attack_trial("unread", Behaviour::UnreadResponses, CrowdAddress::Own),
    attack_trial("stalled-uploads", Behaviour::StalledUploads, CrowdAddress::Own),
    attack_trial("silent-tls", Behaviour::SilentTls, CrowdAddress::Own),
    attack_trial("half-heads-shared", Behaviour::HalfHeads, CrowdAddress::Shared),
    attack_trial("unread-shared", Behaviour::UnreadResponses, CrowdAddress::Shared),
    attack_trial("stalled-uploads-shared", Behaviour::StalledUploads, CrowdAddress::Shared),
    attack_trial("silent-tls-shared", Behaviour::SilentTls, CrowdAddress::Shared),
    slow_trial("slow-heads", Mode::Head),
    slow_trial("slow-bodies", Mode::Body),
    slow_trial("slow-ranges", Mode::Ranges),
    slow_trial("slow-reads", Mode::Read),
];

const fn attack_trial(name: &'static str, behaviour: Behaviour, address: CrowdAddress) -> Trial {
    Trial { name, file: "4KiB", load: attack(behaviour, address), service: Service::FewPlaces }
}

const fn slow_trial(name: &'static str, mode: Mode) -> Trial {
    let service = match mode {
        Mode::Body => Service::TwiceWithUploads,
        _ => Service::Twice,
    };
    Trial { name, file: "4KiB", load: Load::SlowHttpTest(mode), service }
}

/// Servers and trials of a comparison.
#[derive(Debug)]
pub struct ComparisonPlan {
    pub trials: Vec<Trial>,
    /// The servers. The others are compared with the first.
    pub servers: Vec<(ServerKind, Starter)>,
    pub lab: LabArguments,
    pub haul: PathBuf,
    /// Another build of `haul` to measure.
    pub other_haul: Option<PathBuf>,
    /// Options of additional `haul serve` instances, one string for each.
    pub variants: Vec<String>,
    /// Parameters of nginx's directive `listen`, one string for each additional nginx.
    pub nginx_listen: Vec<String>,
}

/// Runs all trials and prints a table for each.
pub fn run(plan: &ComparisonPlan) -> Result<(), String> {
    let comparison = Comparison::new(&plan.lab)?;
    let host = &comparison.lab.sender;
    let haul = copy_program(&plan.haul)?;
    let other_haul = plan.other_haul.as_deref().map(copy_program).transpose()?;
    let mut servers = Vec::new();
    make_certificate(comparison.scratch.path())?;
    let needed = Service::ALL
        .into_iter()
        .filter(|service| plan.trials.iter().any(|trial| trial.service == *service));
    for service in needed {
        let direct = |kind| move |options: &'_ String| (kind, Starter::Direct, options.clone());
        let variants = plan.variants.iter().map(direct(ServerKind::Haul));
        let tuned = plan.nginx_listen.iter().map(direct(ServerKind::Nginx));
        let usual = plan.servers.iter().map(|&(kind, starter)| (kind, starter, String::new()));
        let all = usual.chain(variants).chain(tuned);
        for (kind, starter, options) in all.flat_map(|one| iter::repeat_n(one, service.instances()))
        {
            if !kind.supports(service) {
                continue;
            }
            let setup = Setup {
                root: &comparison.root,
                scratch: comparison.scratch.path(),
                haul: match &other_haul {
                    Some(other) if kind == ServerKind::OtherHaul => other,
                    _ => &haul,
                },
                address: SocketAddr::new(host.address(), FIRST_PORT + servers.len() as u16),
                service,
                starter,
                options: &options,
            };
            let server = kind.start(host, setup)?;
            comparison.wait_until_listening(&server)?;
            servers.push(server);
        }
    }
    for trial in &plan.trials {
        let taking_part = servers.iter().filter(|server| server.service == trial.service);
        comparison.run(trial, &taking_part.collect::<Vec<_>>())?;
    }
    Ok(())
}
