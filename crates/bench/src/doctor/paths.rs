//! Send methods: does the kernel support each, and would it avoid the copy through this device?

use super::{DeviceFacts, PathFinding};
use haul::{Copying, SendMethod};
use haul_workers::tested_method::TestedMethod;
use std::fs;

/// Drivers that deliver packets to another part of this kernel, to which the pages of
/// `MSG_ZEROCOPY` must not pass (`skb_orphan_frags` in their transmit functions).
const LOCAL_DRIVERS: [&str; 8] =
    ["veth", "tun", "bridge", "macvlan", "ipvlan", "netkit", "dummy", "vhost"];

pub(super) fn examine(device: &DeviceFacts) -> Vec<PathFinding> {
    TestedMethod::all()
        .into_iter()
        .filter(|&path| path != SendMethod::Floor.into() && path != TestedMethod::Auto)
        .map(|path| finding(path, device))
        .collect()
}

fn finding(path: TestedMethod, device: &DeviceFacts) -> PathFinding {
    let found = |available, avoids_copy, why: String, fix: Option<String>| PathFinding {
        path: path.name().into(),
        available,
        avoids_copy,
        why,
        fix,
    };
    if let Err(reason) = path.probe() {
        return found(false, false, reason.to_string(), fix_of_refusal(path));
    }
    let name = &device.name;
    if path.copying(false) == Copying::Always {
        return found(
            true,
            false,
            "always copies, through a buffer or from a mapping".into(),
            None,
        );
    }
    if device.scatter_gather == Some(false) || device.transmit_checksum == Some(false) {
        return found(
            true,
            false,
            format!("{name} lacks scatter-gather or checksum offload: the kernel copies packets"),
            Some(format!("ethtool -K {name} tx on sg on tso on")),
        );
    }
    if path.copying(false) == Copying::Pages {
        return found(
            true,
            true,
            format!("the pages of the file or memory go to {name} uncopied"),
            None,
        );
    }
    let is_local = name == "lo"
        || device
            .driver
            .as_deref()
            .is_some_and(|driver| LOCAL_DRIVERS.iter().any(|local| driver.starts_with(local)));
    if is_local {
        let driver = device.driver.as_deref().unwrap_or("loopback");
        return found(
            true,
            false,
            format!(
                "{name} ({driver}) delivers packets to this same kernel, which copies them first: \
                 more expensive than a plain send"
            ),
            None,
        );
    }
    if packet_sockets() > 0 {
        return found(
            true,
            false,
            "a packet socket is open (tcpdump, a DHCP client): data it might receive is copied"
                .into(),
            Some("stop the programs whose sockets /proc/net/packet lists".into()),
        );
    }
    let why = match path {
        TestedMethod::Ring(_) => {
            format!("memory goes to {name} uncopied; a file is read into a buffer first")
        }
        _ => format!("the pages go to {name}; the completions report whether they were copied"),
    };
    found(true, true, why, None)
}

fn fix_of_refusal(path: TestedMethod) -> Option<String> {
    match path {
        TestedMethod::Ring(_) => Some(
            "sysctl kernel.io_uring_disabled=0, and allow io_uring in the container's seccomp \
             profile"
                .into(),
        ),
        TestedMethod::Method(SendMethod::Splice | SendMethod::Vmsplice | SendMethod::Sendfile) => {
            Some("allow splice, vmsplice and sendfile in the container's seccomp profile".into())
        }
        _ => None,
    }
}

/// Number of packet sockets in this network namespace that receive sent packets. A socket with
/// protocol 0 receives nothing.
fn packet_sockets() -> usize {
    let text = fs::read_to_string("/proc/net/packet").unwrap_or_default();
    let protocol = |line: &str| line.split_ascii_whitespace().nth(3).map(str::to_owned);
    text.lines().skip(1).filter_map(protocol).filter(|protocol| protocol != "0000").count()
}
