//! Congestion controls of the kernel.

use crate::error::RunError;
use rustix::net::{AddressFamily, SocketType, socket, sockopt::set_tcp_congestion};
use std::fs;

/// Checks that the kernel has a congestion control, and that this user may choose it.
pub fn check_congestion(name: &str) -> Result<(), RunError> {
    let tcp = socket(AddressFamily::INET, SocketType::STREAM, None);
    let set = tcp.and_then(|tcp| set_tcp_congestion(&tcp, name));
    set.map_err(|errno| {
        let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
        let available = fs::read_to_string(path).unwrap_or_default();
        RunError::Congestion {
            name: name.into(),
            available: available.trim().into(),
            reason: errno.into(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        assert!(check_congestion("reno").is_ok());
        let error = check_congestion("nothing").unwrap_err().to_string();
        assert!(error.contains("nothing") && error.contains("reno"), "{error}");
        assert!(check_congestion("a-name-that-is-longer-than-the-kernel-allows").is_err());
    }
}
