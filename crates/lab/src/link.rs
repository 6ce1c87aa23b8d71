//! The veth pair and its offloads.

use crate::error::LabError;
use crate::host::Host;
use crate::netlink;
use haul_lab_sys::ethtool::{self, Offload};

/// Scatter-gather and transmit checksum offload of the sending device, which the lab switches
/// together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Offloads {
    /// The device gathers and checksums, so the stack sends pages without reading them.
    On,
    /// The device does neither: the stack copies each packet into one buffer and computes the
    /// checksum. Segmentation offload is off too, since it depends on both.
    Off,
}

/// Joins two hosts by a veth pair, assigns their addresses and sets both ends up.
pub(crate) fn join(one: &Host, other: &Host, mtu: u32) -> Result<(), LabError> {
    let Some(namespace) = other.namespace() else {
        return Err(LabError::Loopback("a veth pair"));
    };
    one.run(|| netlink::add_veth(one.device(), mtu, namespace))??;
    for host in [one, other] {
        host.run(|| {
            netlink::add_address(host.device(), host.address())?;
            netlink::set_up(host.device())
        })??;
    }
    Ok(())
}

/// Switches TCP segmentation offload of `device`, in the calling thread's namespace.
pub(crate) fn set_segmentation(device: &str, on: bool) -> Result<(), LabError> {
    let offload = Offload::TcpSegmentation;
    ethtool::set_offload(device, offload, on)
        .map_err(LabError::step(format!("switching offload {} of {device}", offload.name())))
}

/// Switches the offloads of `device`, in the calling thread's namespace, and verifies each.
pub(crate) fn set_offloads(device: &str, wanted: Offloads) -> Result<(), LabError> {
    let on = wanted == Offloads::On;
    let mut order = [Offload::TransmitChecksum, Offload::ScatterGather, Offload::TcpSegmentation];
    if !on {
        // Segmentation depends on the other two, so it is switched off first and on last.
        order.reverse();
    }
    for offload in order {
        ethtool::set_offload(device, offload, on)
            .map_err(LabError::step(format!("switching offload {} of {device}", offload.name())))?;
    }
    for offload in order {
        let is_on = ethtool::offload(device, offload)
            .map_err(LabError::step(format!("reading offload {} of {device}", offload.name())))?;
        if is_on != on {
            return Err(LabError::Offload {
                device: device.into(),
                offload: offload.name(),
                state: if is_on { "on" } else { "off" },
            });
        }
    }
    Ok(())
}
