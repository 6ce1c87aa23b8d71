//! Who vouches that a rank belongs to the fleet, if the ranks meet at an address.
//!
//! * `HAUL_TOKEN` is a secret of all ranks. The ranks never send the token. They prove its
//!   possession by keyed hashes (BLAKE3).
//! * munge is the service by which the hosts of a Slurm cluster prove the user of a process. munge
//!   proves the user and not the job, so another job of the user can join.

use crate::error::Error;
use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The shortest token. `openssl rand -hex 16` prints 32 characters.
const TOKEN_BYTES_MIN: usize = 16;
/// The context of the key that is derived from a token.
const KEY_CONTEXT: &str = "haul fleet 1: the key of a token";
/// The most bytes of a proof. A credential of munge has about 250 bytes.
pub const PROOF_BYTES_MAX: usize = 4096;

/// The time to wait until unmunge may run.
const UNMUNGE_TIME_MAX: Duration = Duration::from_secs(10);
/// The interval at which it is noticed that unmunge may run.
const UNMUNGE_INTERVAL: Duration = Duration::from_millis(5);
/// The most processes of unmunge at a time.
const UNMUNGE_MAX: usize = 8;

/// Who vouches for the ranks.
#[derive(Clone)]
pub enum Vouch {
    /// The key of `HAUL_TOKEN`.
    Token([u8; 32]),
    /// munge, for processes of this user.
    Munge {
        /// The user of this process.
        uid: u32,
    },
    /// The user of haul, by `--insecure`, or because all ranks are on this host.
    Nothing,
}

/// The key stays out of messages.
impl fmt::Debug for Vouch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Token(_) => "Token",
            Self::Munge { .. } => "Munge",
            Self::Nothing => "Nothing",
        })
    }
}

impl Vouch {
    /// The key of a token.
    pub fn by_token(token: &str) -> Result<Self, Error> {
        if token.len() < TOKEN_BYTES_MIN {
            return Err(Error::ShortToken { bytes: token.len(), min: TOKEN_BYTES_MIN });
        }
        Ok(Self::Token(blake3::derive_key(KEY_CONTEXT, token.as_bytes())))
    }

    /// The user of this process, if munge answers on this host.
    pub fn by_munge() -> Option<Self> {
        let uid = rustix::process::geteuid().as_raw();
        encode("haul").is_ok().then_some(Self::Munge { uid })
    }

    /// Proves that this rank sent a message with this hash.
    pub fn prove(&self, hash: &blake3::Hash) -> Result<Vec<u8>, Error> {
        match self {
            Self::Token(key) => Ok(blake3::keyed_hash(key, hash.as_bytes()).as_bytes().to_vec()),
            Self::Munge { .. } => encode(hash.to_hex().as_str()),
            Self::Nothing => Ok(Vec::new()),
        }
    }

    /// Checks a proof. The error is the reason.
    pub fn check(&self, hash: &blake3::Hash, proof: &[u8]) -> Result<(), String> {
        match self {
            Self::Token(key) => {
                let proof: [u8; 32] = proof.try_into().map_err(|_| "not a proof of a token")?;
                // The comparison takes the same time for every proof.
                let is_right = blake3::keyed_hash(key, hash.as_bytes()) == proof;
                if is_right { Ok(()) } else { Err("the other rank has another HAUL_TOKEN".into()) }
            }
            Self::Munge { uid } => decode(proof, *uid, hash.to_hex().as_str()),
            Self::Nothing => Ok(()),
        }
    }
}

/// A credential of munge with this text.
fn encode(text: &str) -> Result<Vec<u8>, Error> {
    let failed = |problem: String| Error::Munge(problem);
    let output = Command::new("munge")
        .args(["--no-input", "--string", text])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(format!("munge: {error}")))?;
    if !output.status.success() {
        let line = String::from_utf8_lossy(&output.stderr);
        return Err(failed(line.lines().next().unwrap_or("munge failed").to_owned()));
    }
    Ok(output.stdout)
}

/// Checks that a credential is of this user and has this text.
fn decode(credential: &[u8], uid: u32, text: &str) -> Result<(), String> {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    let deadline = Instant::now() + UNMUNGE_TIME_MAX;
    // Strangers must not start many processes.
    let is_free = || {
        let more = |running| (running < UNMUNGE_MAX).then_some(running + 1);
        RUNNING.fetch_update(Relaxed, Relaxed, more).is_ok()
    };
    while !is_free() {
        if Instant::now() > deadline {
            return Err("too many ranks come at the same time".into());
        }
        thread::sleep(UNMUNGE_INTERVAL);
    }
    let decoded = unmunge(credential, uid, text);
    RUNNING.fetch_sub(1, Relaxed);
    decoded
}

fn unmunge(credential: &[u8], uid: u32, text: &str) -> Result<(), String> {
    let mut child = Command::new("unmunge")
        .args(["--numeric", "--keys", "STATUS,UID"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("unmunge: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // unmunge may refuse the credential before it read everything.
        let _ = stdin.write_all(credential);
    }
    let output = child.wait_with_output().map_err(|error| format!("unmunge: {error}"))?;
    check_decoded(&String::from_utf8_lossy(&output.stdout), uid, text)
}

/// Checks what unmunge printed: the status and the user, an empty line, and the text.
fn check_decoded(printed: &str, uid: u32, text: &str) -> Result<(), String> {
    let (metadata, payload) = printed.split_once("\n\n").unwrap_or((printed, ""));
    let value = |key: &str| {
        metadata.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
    };
    match (value("STATUS"), value("UID")) {
        (Some("0"), Some(user)) if user == uid.to_string() => {
            let is_same = payload.trim_end_matches('\n') == text;
            if is_same { Ok(()) } else { Err("the credential is of another message".into()) }
        }
        (Some("0"), Some(user)) => {
            Err(format!("one rank is a process of user {user}, and the other rank of user {uid}"))
        }
        (Some(status), _) => Err(format!("munge refused the credential (status {status})")),
        (None, _) => Err("unmunge printed no status".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_proves_a_message() {
        let [one, other] =
            ["0123456789abcdef", "0123456789abcdeF"].map(|token| Vouch::by_token(token).unwrap());
        let (hash, changed) = (blake3::hash(b"message"), blake3::hash(b"other"));
        let proof = one.prove(&hash).unwrap();
        assert_eq!(one.check(&hash, &proof), Ok(()));
        assert!(one.check(&changed, &proof).is_err());
        assert!(other.check(&hash, &proof).is_err());
        assert!(one.check(&hash, b"").is_err());
        assert!(matches!(Vouch::by_token("short"), Err(Error::ShortToken { .. })));
    }

    #[test]
    fn a_credential_is_of_the_user_and_the_message() {
        let check = |printed: &str| check_decoded(printed, 7, "text");
        assert_eq!(check("STATUS:          0\nUID:             7\n\ntext"), Ok(()));
        for (printed, part) in [
            ("STATUS: 0\nUID: 7\n\nother", "another message"),
            ("STATUS: 0\nUID: 7\n", "another message"),
            ("STATUS: 0\nUID: 8\n\ntext", "user 8, and the other rank of user 7"),
            ("STATUS: 17\nUID: 7\n\ntext", "status 17"),
            ("", "no status"),
        ] {
            assert!(check(printed).unwrap_err().contains(part), "{printed:?}");
        }
    }
}
