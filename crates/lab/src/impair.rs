//! Link impairments: a rate limit and packet loss.

use crate::error::LabError;
use crate::netlink;
use netlink_packet_core::DefaultNla;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;

/// Share of packets to drop, in millionths.
///
/// With segmentation offload a packet here is a segment of up to 64 KiB. A loss of 1 % therefore
/// loses far more per byte than 1 % on a physical link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loss {
    parts_per_million: u32,
}

/// The error for a loss that is not a percentage from 0 to 100.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a loss: give a percentage from 0 to 100, such as 0.1%")]
pub struct ParseLossError(String);

impl FromStr for Loss {
    type Err = ParseLossError;

    fn from_str(text: &str) -> Result<Self, ParseLossError> {
        let number = text.strip_suffix('%').unwrap_or(text).trim();
        match number.parse::<f64>() {
            Ok(percent) if (0.0..=100.0).contains(&percent) => {
                Ok(Self { parts_per_million: (percent * 10_000.0).round() as u32 })
            }
            _ => Err(ParseLossError(text.into())),
        }
    }
}

/// Installs an nftables drop rule in the calling thread's namespace, replacing any earlier one.
pub(crate) fn set_loss(loss: Loss) -> Result<(), LabError> {
    let delete_table = "table inet haul {}\ndelete table inet haul\n";
    let of_packets = match loss.parts_per_million {
        0 => None,
        // nft refuses to compare with a number that is out of range.
        1_000_000 => Some(String::new()),
        parts => Some(format!("numgen random mod 1000000 < {parts}")),
    };
    let rule = of_packets.map_or(String::new(), |packets| {
        format!(
            "table inet haul {{ chain loss {{ type filter hook prerouting priority raw; \
             {packets} drop; }}; }}\n"
        )
    });
    let rules = format!("{delete_table}{rule}");
    let failed = |problem: String| LabError::Program { program: "nft", problem };
    let mut child = Command::new(find_program("nft"))
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => failed(
                "is neither in PATH nor in /usr/sbin or /sbin: apt-get install nftables".into(),
            ),
            _ => failed(error.to_string()),
        })?;
    let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(rules.as_bytes()));
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    match (written, output.status.success()) {
        (Ok(()), true) => Ok(()),
        _ => Err(failed(format!("failed: {}", String::from_utf8_lossy(&output.stderr).trim()))),
    }
}

/// The path of a program for administrators, whose folders are not in the PATH of Debian's users.
/// The name alone if no folder has the program.
fn find_program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let mut programs = folders.map(|folder| folder.join(name));
    programs.find(|program| program.is_file()).unwrap_or_else(|| name.into())
}

/// `TCA_TBF_PARMS`, `TCA_TBF_RATE64`, `TCA_TBF_BURST`, from `<linux/pkt_sched.h>`.
const TBF_PARAMETERS: u16 = 1;
const TBF_RATE64: u16 = 4;
const TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: the kernel computes lengths itself and needs no rate table.
const LINK_LAYER_ETHERNET: u8 = 1;
/// Size of the token bucket: at least one whole offloaded segment, or the kernel would have to
/// split it.
const BURST_BYTES: u32 = 256 * 1024;
/// Size of the token bucket's queue; its overflow is loss, to which TCP adapts.
const QUEUE_BYTES: u32 = 4 * 1024 * 1024;

/// Installs a token bucket filter on `device`; `None` removes it.
pub(crate) fn set_rate(
    device: &str,
    mtu: u32,
    bits_per_second: Option<u64>,
) -> Result<(), LabError> {
    let Some(bits_per_second) = bits_per_second else {
        return netlink::remove_qdisc(device);
    };
    let bytes_per_second = (bits_per_second / 8).max(1);
    // struct tc_tbf_qopt: two struct tc_ratespec, then limit, buffer and mtu.
    let mut parameters = Vec::with_capacity(36);
    for rate in [u32::try_from(bytes_per_second).unwrap_or(u32::MAX), 0] {
        parameters.extend([0, LINK_LAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
        parameters.extend(rate.to_ne_bytes());
    }
    for value in [QUEUE_BYTES, 0, mtu] {
        parameters.extend(value.to_ne_bytes());
    }
    netlink::replace_qdisc(
        device,
        "tbf",
        vec![
            DefaultNla::new(TBF_PARAMETERS, parameters),
            DefaultNla::new(TBF_RATE64, bytes_per_second.to_ne_bytes().to_vec()),
            DefaultNla::new(TBF_BURST, BURST_BYTES.to_ne_bytes().to_vec()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_a_percentage() {
        assert_eq!("0.1%".parse(), Ok(Loss { parts_per_million: 1000 }));
        assert_eq!("100".parse(), Ok(Loss { parts_per_million: 1_000_000 }));
        for bad in ["", "-1", "101", "NaN", "1%%", "a"] {
            assert!(bad.parse::<Loss>().is_err(), "{bad:?}");
        }
    }
}
