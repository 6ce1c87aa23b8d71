//! Receive packet steering: which CPU does a host's packet work.
//!
//! A veth device has no interrupt; packets would be received on the CPU that sent them. Steering hands them
//! to the receiving host's CPU instead.

use std::fs;
use std::io;

/// The mask that devices made later in this network namespace take (Linux 6.3; each namespace its own).
const DEFAULT_MASK: &str = "/proc/sys/net/core/rps_default_mask";

/// Sets the default mask of the calling thread's namespace to `cpu`. An ordinary user may do this in a
/// namespace of his own, unlike writing `rps_cpus`. An older kernel has no such file: see [`check_or_steer`].
pub(crate) fn set_default_mask(cpu: usize) {
    // Failure shows when the device's own mask is asked for, or is made good there.
    let _ = fs::write(DEFAULT_MASK, mask(cpu));
}

/// Makes sure that `device` is steered to `cpu`, with the device's own `rps_cpus` where the kernel has no
/// default mask.
pub(crate) fn check_or_steer(device: &str, cpu: usize) -> io::Result<()> {
    if fs::read_to_string(DEFAULT_MASK).is_ok_and(|text| is_mask_of(&text, cpu)) {
        return Ok(());
    }
    steer_by_sysfs(device, cpu)
}

/// The sysfs at `/sys` shows the devices of the namespace it was mounted in, so a private one is mounted over it, seen by
/// the calling thread alone. Needs root.
pub(crate) fn mount_own_sysfs() -> io::Result<()> {
    use rustix::mount::{MountFlags, MountPropagationFlags};
    haul_sys::namespace::unshare_mounts()?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(rustix::mount::mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?)
}

/// Writes `rps_cpus`, which needs root.
fn steer_by_sysfs(device: &str, cpu: usize) -> io::Result<()> {
    mount_own_sysfs()?;
    let path = format!("/sys/class/net/{device}/queues/rx-0/rps_cpus");
    fs::write(&path, mask(cpu))?;
    if is_mask_of(&fs::read_to_string(&path)?, cpu) {
        Ok(())
    } else {
        Err(io::Error::other(format!("{path} did not keep the mask")))
    }
}

/// The kernel's notation for a set of one CPU: groups of 32 bits in hexadecimal, highest first.
fn mask(cpu: usize) -> String {
    let mut text = format!("{:x}", 1u32 << (cpu % 32));
    for _ in 0..cpu / 32 {
        text.push_str(",00000000");
    }
    text
}

fn is_mask_of(text: &str, cpu: usize) -> bool {
    let significant =
        |text: &str| text.trim().replace(',', "").trim_start_matches('0').to_ascii_lowercase();
    significant(text) == significant(&mask(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_written_as_the_kernel_writes_them() {
        assert_eq!(mask(0), "1");
        assert_eq!(mask(5), "20");
        assert_eq!(mask(33), "2,00000000");
        assert!(is_mask_of("00000002,00000000\n", 33));
        assert!(!is_mask_of("0\n", 0));
    }

    /// The way of kernels before 6.3, on whatever kernel this is.
    #[test]
    fn a_device_can_be_steered_by_sysfs() {
        let lab = match crate::Lab::veth(&crate::Settings::default()) {
            Ok(lab) => lab,
            Err(error) => {
                return eprintln!("SKIPPED: steering is not tested, there is no lab: {error}");
            }
        };
        let host = &lab.receiver;
        match host.run(|| steer_by_sysfs(host.device(), lab.sender.cpu())).unwrap() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                eprintln!("SKIPPED: steering by sysfs needs root: {error}");
            }
            steered => steered.unwrap(),
        }
    }
}
