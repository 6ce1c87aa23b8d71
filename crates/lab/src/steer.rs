//! Receive packet steering (RPS): which CPU processes a host's received packets.
//!
//! A veth device does not have an interrupt, so packets would be processed on the CPU that sent
//! them. Steering moves that work to the receiving host's CPU.

use std::fs;
use std::io;

/// Mask that devices created later in this network namespace take (Linux 6.3; one per namespace).
const DEFAULT_MASK: &str = "/proc/sys/net/core/rps_default_mask";

/// Sets the default mask of the calling thread's namespace to `cpu`.
///
/// An ordinary user may do this in a namespace of their own, but may not write `rps_cpus`. An older
/// kernel has no such file: see [`check_or_steer`].
pub(crate) fn set_default_mask(cpu: usize) {
    // A failure is detected, and corrected where possible, by `check_or_steer`.
    let _ = fs::write(DEFAULT_MASK, mask(cpu));
}

/// Verifies that `device` is steered to `cpu`; writes the device's `rps_cpus` if the kernel does
/// not have a default mask.
pub(crate) fn check_or_steer(device: &str, cpu: usize) -> io::Result<()> {
    if fs::read_to_string(DEFAULT_MASK).is_ok_and(|text| is_mask_of(&text, cpu)) {
        return Ok(());
    }
    steer_by_sysfs(device, cpu)
}

/// File systems that are usually mounted below `/sys` and stay visible there.
const BELOW_SYS: [&str; 4] =
    ["/sys/fs/cgroup", "/sys/fs/bpf", "/sys/kernel/debug", "/sys/kernel/tracing"];

/// Mounts a private sysfs over `/sys`, visible to the calling thread and the programs that it
/// starts. Needs root.
///
/// A sysfs shows the devices of the namespace in which it was mounted. The file systems of
/// [`BELOW_SYS`] stay visible from Linux 5.2 on.
pub(crate) fn mount_own_sysfs() -> io::Result<()> {
    use rustix::fs::CWD;
    use rustix::mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, move_mount, open_tree,
    };
    haul_lab_sys::namespace::unshare_mounts()?;
    // Mounts and unmounts of the host still reach the programs, but not the reverse.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", propagation)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
    let below = BELOW_SYS.map(|path| (path, open_tree(CWD, path, flags)));
    rustix::mount::mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?;
    for (path, tree) in below {
        let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        // Programs of the lab rarely need these.
        let _ = tree.and_then(|tree| move_mount(tree, "", CWD, path, empty));
    }
    Ok(())
}

/// Steers `device` by its `rps_cpus` in sysfs, which needs root.
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

/// Formats the mask of one CPU as the kernel does: groups of 32 bits in hexadecimal, highest first.
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
    fn masks_are_formatted_as_the_kernel_formats_them() {
        assert_eq!(mask(0), "1");
        assert_eq!(mask(5), "20");
        assert_eq!(mask(33), "2,00000000");
        assert!(is_mask_of("00000002,00000000\n", 33));
        assert!(!is_mask_of("0\n", 0));
    }

    /// Tests the method for kernels before 6.3, on any kernel.
    #[test]
    fn a_device_can_be_steered_by_sysfs() {
        let lab = match crate::lab::Lab::veth(&crate::lab::Settings::default()) {
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
