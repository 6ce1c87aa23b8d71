//! Another user for a service that root starts.

use std::fs;

/// Whether a service of this process can switch to the unprivileged user of Debian (65534).
pub fn can_switch_user() -> bool {
    let has_user = fs::read_to_string("/etc/passwd").is_ok_and(|users| users.contains("nobody:"));
    let can_switch = rustix::process::geteuid().is_root() && has_user;
    if !can_switch {
        eprintln!("SKIPPED: only root can switch to another user, who must exist");
    }
    can_switch
}
