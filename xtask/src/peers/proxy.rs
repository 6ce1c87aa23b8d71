//! `cargo xtask peers proxy`: compares the cost of layer-4 proxies with that of haul.
//!
//! Each proxy forwards to a separate nginx, which runs beside the clients on the other host. No
//! proxy has its port: `haul proxy` clamps the congestion window of connections by their port.

use crate::peers::LabArguments;
use crate::peers::proxies::{ProxyKind, ProxySetup};
use crate::peers::servers::{ServerKind, Service, Setup, Starter};
use crate::peers::trial::{
    Comparison, FEW, Load, MANY_BULK, ONE_BULK, Trial, Window, copy_program,
};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Port of the first proxy.
const FIRST_PORT: u16 = 8001;
/// Port of the first server. At the port of a proxy its window would be clamped, too, which on
/// another machine it is not.
const FIRST_SERVER_PORT: u16 = 9001;

const HUNDRED: Load = Load::Requests { connections: 100, seconds: 1, window: Window::All };
/// Below what 20,000 descriptors allow, a usual hard limit: two for each connection, and some more.
const IDLE: Load = Load::Idle { connections: 9500 };
/// Beside clients that do not read.
const STALLED: Load = Load::BesideStalled { stalled: 2000 };
const SHORT: Load = Load::Connections { at_a_time: 16, seconds: 1 };

/// Nine small bodies and one of a MiB by turns.
const MIXED: Load = Load::Mixed { connections: 16, seconds: 1 };

/// All trials, in the order of their execution.
pub const TRIALS: [Trial; 12] = [
    trial("256MiB", "256MiB", ONE_BULK),
    trial("256MiB-64", "256MiB", MANY_BULK),
    trial("256MiB-stalled", "256MiB", STALLED),
    trial("1MiB", "1MiB", FEW),
    trial("64KiB", "64KiB", FEW),
    trial("16KiB", "16KiB", FEW),
    trial("4KiB", "4KiB", FEW),
    trial("1KiB", "1KiB", FEW),
    trial("100B-100", "100B", HUNDRED),
    trial("mixed", "100B", MIXED),
    trial("new-connections", "100B", SHORT),
    trial("idle-9500", "100B", IDLE),
];

const fn trial(name: &'static str, file: &'static str, load: Load) -> Trial {
    Trial { name, file, load, service: Service::Plain }
}

/// Proxies and trials of a comparison.
#[derive(Debug)]
pub struct ProxyPlan {
    pub trials: Vec<Trial>,
    pub kinds: Vec<ProxyKind>,
    pub lab: LabArguments,
    pub haul: PathBuf,
    /// Another build of `haul` to measure.
    pub other_haul: Option<PathBuf>,
    /// Options of additional `haul proxy` instances, one string for each.
    pub variants: Vec<String>,
    /// Directives of the section `global` of additional HAProxies that splice, one for each.
    pub haproxy_global: Vec<String>,
}

/// Runs all trials and prints a table for each.
pub fn run(plan: &ProxyPlan) -> Result<(), String> {
    let comparison = Comparison::new(&plan.lab)?;
    let lab = &comparison.lab;
    let haul = copy_program(&plan.haul)?;
    let other_haul = plan.other_haul.as_deref().map(copy_program).transpose()?;
    let variants = plan.variants.iter().map(|options| (ProxyKind::Haul, &**options));
    let tuned = plan.haproxy_global.iter().map(|line| (ProxyKind::HaproxySplice, &**line));
    let other = other_haul.as_ref().map(|_| ProxyKind::OtherHaul);
    let usual = plan.kinds.iter().copied().chain(other).map(|kind| (kind, ""));
    let (mut upstreams, mut proxies) = (Vec::new(), Vec::new());
    for (index, (kind, options)) in usual.chain(variants).chain(tuned).enumerate() {
        let port = FIRST_PORT + index as u16;
        let scratch = comparison.scratch.path();
        let server_port = FIRST_SERVER_PORT + index as u16;
        let upstream = SocketAddr::new(lab.receiver.address(), server_port);
        let setup = Setup {
            root: &comparison.root,
            scratch,
            haul: &haul,
            address: upstream,
            service: Service::Plain,
            starter: Starter::Direct,
            options: "",
        };
        let server = ServerKind::Nginx.start(&lab.receiver, setup)?;
        comparison.wait_until_listening(&server)?;
        upstreams.push(server);
        let address = SocketAddr::new(lab.sender.address(), port);
        let haul = match &other_haul {
            Some(other) if kind == ProxyKind::OtherHaul => other,
            _ => &haul,
        };
        let setup = ProxySetup { scratch, haul, address, upstream, options };
        let proxy = kind.start(&lab.sender, setup)?;
        comparison.wait_until_listening(&proxy)?;
        proxies.push((kind, proxy));
    }
    for trial in &plan.trials {
        let takes_part = |kind: ProxyKind| trial.load.connections() <= kind.connections_max();
        let taking_part = proxies.iter().filter(|(kind, _)| takes_part(*kind));
        comparison.run(trial, &taking_part.map(|(_, proxy)| proxy).collect::<Vec<_>>())?;
    }
    Ok(())
}
