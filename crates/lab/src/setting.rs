//! A setting of the whole machine, changed for a while.
//!
//! Few settings that matter here are not a namespace's own. One that is not is put back by a process that waits
//! for nothing but this one's end, so that it is put back even after `kill -9`.

use crate::LabError;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Waits until its input ends, then writes its first argument to its output. Signals that a terminal sends to
/// everybody do not end it early.
const GUARD: &str = "trap '' INT TERM HUP QUIT; cat >/dev/null; printf '%s\\n' \"$0\"";

/// A sysctl that is put back on drop, or when this process ends in any way.
#[derive(Debug)]
pub struct HostSetting {
    name: String,
    file: PathBuf,
    value: String,
    guard: Child,
}

impl HostSetting {
    /// Takes hold of a sysctl, named as `sysctl` does (`net.core.high_order_alloc_disable`).
    ///
    /// Fails where it does not exist or may not be written, and where another process holds it already.
    pub fn hold(name: &str) -> Result<Self, LabError> {
        let file = PathBuf::from("/proc/sys").join(name.replace('.', "/"));
        let refused = |source| LabError::Setting { name: name.into(), source };
        let for_guard = OpenOptions::new().write(true).open(&file).map_err(refused)?;
        // The guard's descriptor is this one, so it holds the lock until it has put the value back.
        flock(&for_guard, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            refused(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "another run is using it, wait for its end",
            ))
        })?;
        // Read under the lock: before it, the value could be another run's.
        let value = fs::read_to_string(&file).map_err(refused)?;
        let value = value.trim().to_owned();
        let mut command = Command::new("sh");
        command
            .args(["-c", GUARD, &value])
            .stdin(Stdio::piped())
            .stdout(for_guard)
            .stderr(Stdio::null());
        // Nobody ends it together with this process's group.
        let guard = haul_sys::child::in_new_session(&mut command)
            .spawn()
            .map_err(LabError::step("starting the guard of a host setting"))?;
        Ok(Self { name: name.into(), file, value, guard })
    }

    /// Changes it.
    pub fn set(&self, value: &str) -> Result<(), LabError> {
        fs::write(&self.file, value)
            .map_err(|source| LabError::Setting { name: self.name.clone(), source })
    }
}

impl Drop for HostSetting {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        // It ends by itself now; an error means that it is gone.
        let _ = self.guard.wait();
        if fs::read_to_string(&self.file).is_ok_and(|now| now.trim() != self.value) {
            eprintln!(
                "haul: host setting {} was not put back: sysctl -w {0}={}",
                self.name, self.value
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A setting that changes nothing anybody here relies on.
    const HARMLESS: &str = "net.core.netdev_unregister_timeout_secs";

    fn value() -> String {
        fs::read_to_string("/proc/sys/net/core/netdev_unregister_timeout_secs").unwrap_or_default()
    }

    #[test]
    fn a_setting_is_put_back_and_has_one_holder() {
        let before = value();
        let setting = match HostSetting::hold(HARMLESS) {
            Ok(setting) => setting,
            Err(error) => {
                return eprintln!("SKIPPED: host settings cannot be changed here: {error}");
            }
        };
        setting.set("7").unwrap();
        assert_eq!(value().trim(), "7");
        let second = HostSetting::hold(HARMLESS).unwrap_err().to_string();
        assert!(second.contains("another run"), "{second}");
        drop(setting);
        assert_eq!(value(), before);
        let unknown = HostSetting::hold("net.core.no_such_thing").unwrap_err().to_string();
        assert!(unknown.contains("net.core.no_such_thing"), "{unknown}");
    }
}
