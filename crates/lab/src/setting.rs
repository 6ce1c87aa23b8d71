//! A sysctl of the whole machine, changed temporarily.
//!
//! Few settings that matter here are global rather than separate for each network namespace. A
//! separate process waits for this one to end and restores the value, even after `kill -9`.

use crate::error::LabError;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Shell script that waits until its input ends, then writes its first argument to its output.
///
/// It ignores the signals that a terminal sends to all processes of a group.
const RESTORE_SCRIPT: &str = "trap '' INT TERM HUP QUIT; cat >/dev/null; printf '%s\\n' \"$0\"";

/// A sysctl that is restored on drop, or when this process ends in any way.
#[derive(Debug)]
pub struct HostSetting {
    name: String,
    file: PathBuf,
    value: String,
    restorer: Child,
}

impl HostSetting {
    /// Locks a sysctl and starts the process that restores it.
    ///
    /// The name is as in `sysctl` (`net.core.high_order_alloc_disable`). Fails if the sysctl does
    /// not exist, may not be written, or is locked by another process.
    pub fn override_until_drop(name: &str) -> Result<Self, LabError> {
        let file = PathBuf::from("/proc/sys").join(name.replace('.', "/"));
        let setting_error = |error| LabError::Setting { name: name.into(), error };
        let lock_file = OpenOptions::new().write(true).open(&file).map_err(setting_error)?;
        // The restoring process inherits this descriptor, so it holds the lock until it has
        // restored the value.
        flock(&lock_file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            setting_error(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "another run is using it: wait until it ends",
            ))
        })?;
        // Read under the lock: before it, the value could be another run's.
        let value = fs::read_to_string(&file).map_err(setting_error)?;
        let value = value.trim().to_owned();
        // A container may allow the file to be opened and not to be written.
        fs::write(&file, &value).map_err(setting_error)?;
        let mut command = Command::new("sh");
        command
            .args(["-c", RESTORE_SCRIPT, &value])
            .stdin(Stdio::piped())
            .stdout(lock_file)
            .stderr(Stdio::null());
        // In its own session it is not killed together with this process's group.
        let restorer = haul_lab_sys::child::start_in_new_session(&mut command)
            .spawn()
            .map_err(LabError::step("starting the process that restores a host setting"))?;
        Ok(Self { name: name.into(), file, value, restorer })
    }

    /// Changes the value.
    pub fn set(&self, value: &str) -> Result<(), LabError> {
        fs::write(&self.file, value)
            .map_err(|error| LabError::Setting { name: self.name.clone(), error })
    }
}

impl Drop for HostSetting {
    fn drop(&mut self) {
        drop(self.restorer.stdin.take());
        // The restoring process ends now that its input is closed; an error means that it has ended
        // already.
        let _ = self.restorer.wait();
        if fs::read_to_string(&self.file).is_ok_and(|now| now.trim() != self.value) {
            eprintln!(
                "haul: host setting {} was not restored: run sysctl -w {0}={}",
                self.name, self.value
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A setting that no program on a test machine depends on.
    const HARMLESS: &str = "net.core.netdev_unregister_timeout_secs";

    fn value() -> String {
        fs::read_to_string("/proc/sys/net/core/netdev_unregister_timeout_secs").unwrap_or_default()
    }

    #[test]
    fn a_setting_is_restored_on_drop_and_has_one_holder() {
        let before = value();
        let setting = match HostSetting::override_until_drop(HARMLESS) {
            Ok(setting) => setting,
            Err(error) => {
                return eprintln!("SKIPPED: host settings cannot be changed here: {error}");
            }
        };
        setting.set("7").unwrap();
        assert_eq!(value().trim(), "7");
        let second = HostSetting::override_until_drop(HARMLESS).unwrap_err().to_string();
        assert!(second.contains("another run"), "{second}");
        drop(setting);
        assert_eq!(value(), before);
        let unknown =
            HostSetting::override_until_drop("net.core.no_such_thing").unwrap_err().to_string();
        assert!(unknown.contains("net.core.no_such_thing"), "{unknown}");
    }
}
