//! What the kernel does for its own protection that changes the cost of copies and system calls.

use flate2::read::GzDecoder;
use std::fs::{self, File};
use std::io::Read;

/// Longest configuration that is read, to bound the memory that a gzip file takes.
const CONFIGURATION_BYTES_MAX: u64 = 4 << 20;

/// Whether the kernel fills each new page with zeros (`init_on_alloc`, Linux 5.3): a copy into new
/// pages then writes each byte twice. `None` if neither the command line nor a configuration tells.
pub(crate) fn zeroes_new_pages() -> Option<bool> {
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    zeroes_by(&command_line, configuration().as_deref())
}

fn zeroes_by(command_line: &str, configuration: Option<&str>) -> Option<bool> {
    let words = command_line.split_whitespace();
    let by_word = words.filter_map(|word| word.strip_prefix("init_on_alloc=")).next_back();
    if let Some(value) = by_word {
        // As the kernel reads a boolean: by the first letter, and the second of `on` and `off`.
        return Some(matches!(value.as_bytes(), [b'1' | b'y' | b'Y' | b't' | b'T', ..] | b"on"));
    }
    let lines = configuration?.lines();
    Some(lines.into_iter().any(|line| line == "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y"))
}

/// The configuration with which the kernel was built, if the kernel or the distribution shows it.
fn configuration() -> Option<String> {
    let mut text = String::new();
    if let Ok(compressed) = File::open("/proc/config.gz") {
        let mut limited = GzDecoder::new(compressed).take(CONFIGURATION_BYTES_MAX);
        if limited.read_to_string(&mut text).is_ok() {
            return Some(text);
        }
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    fs::read_to_string(format!("/boot/config-{release}")).ok()
}

/// The weaknesses of the CPU against which the kernel takes measures, each by its name in sysfs.
/// `None` if sysfs does not list weaknesses.
pub(crate) fn mitigations() -> Option<Vec<String>> {
    let entries = fs::read_dir("/sys/devices/system/cpu/vulnerabilities").ok()?.flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| {
            let state = fs::read_to_string(entry.path()).unwrap_or_default();
            state.starts_with("Mitigation")
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_counts_more_than_the_configuration() {
        let on = Some("CONFIG_A=y\nCONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\n");
        let off = Some("# CONFIG_INIT_ON_ALLOC_DEFAULT_ON is not set\n");
        assert_eq!(zeroes_by("quiet", on), Some(true));
        assert_eq!(zeroes_by("quiet", off), Some(false));
        assert_eq!(zeroes_by("quiet", None), None);
        assert_eq!(zeroes_by("init_on_alloc=1 init_on_alloc=0", on), Some(false));
        assert_eq!(zeroes_by("init_on_alloc=on", off), Some(true));
        assert_eq!(zeroes_by("init_on_alloc=off", None), Some(false));
    }
}
