//! Sends a command to the control socket of a running service.

use crate::output::Failure;
use haul_server::command_socket::send_command;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Sends a command to a service, whose name is such as `haul proxy`. Returns the answer as text and
/// parsed.
pub fn command<R: DeserializeOwned>(
    service: &str,
    socket: &Path,
    command: &str,
) -> Result<(String, R), Failure> {
    let failed = |error: io::Error| {
        let is_other = |file: std::fs::Metadata| !file.file_type().is_socket();
        if socket.metadata().is_ok_and(is_other) {
            return Failure::failed(format!("{}: not a socket", socket.display()));
        }
        let advice = match error.kind() {
            ErrorKind::NotFound if !socket.as_os_str().as_bytes().contains(&b'/') => format!(
                ": no {service} runs with this --control, whose path comes before the command"
            ),
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                format!(": no {service} runs with this --control")
            }
            // The timeout of a receive.
            ErrorKind::WouldBlock => {
                ": no answer yet: the command may still be carried out (reload: see status)".into()
            }
            ErrorKind::PermissionDenied => {
                ": only root and the user that started the service may".into()
            }
            _ => String::new(),
        };
        Failure::failed(format!("{}: {error}{advice}", socket.display()))
    };
    let answer = send_command(socket, command).map_err(failed)?;
    let problem = |problem: String| Failure::failed(format!("{}: {problem}", socket.display()));
    if answer.is_empty() {
        return Err(problem("no answer, because the service ended or was busy: try again".into()));
    }
    let response = serde_json::from_str(&answer).map_err(|_| {
        problem(format!("not an answer of {service}: is the socket another service's?"))
    })?;
    Ok((answer, response))
}
