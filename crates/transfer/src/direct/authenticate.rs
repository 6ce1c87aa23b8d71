//! How both ends of a direct stream show each other that they know the secret.
//!
//! The listening end sends a random number. The connecting end answers with another random number
//! and with a keyed hash (BLAKE3) of both numbers. The listening end answers with another keyed
//! hash of both, so a hash that was recorded is of no use in another connection.

use super::Secret;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io::{self, Read, Write};

type Nonce = [u8; 32];

/// Recognizes the connecting end.
pub fn as_listener(stream: &mut (impl Read + Write + ?Sized), secret: &Secret) -> io::Result<()> {
    let ours = nonce()?;
    stream.write_all(&ours)?;
    stream.flush()?;
    let (mut theirs, mut proof) = (Nonce::default(), [0; 32]);
    stream.read_exact(&mut theirs)?;
    stream.read_exact(&mut proof)?;
    check(secret, b"haul connector", [&ours, &theirs], proof)?;
    stream.write_all(hash(secret, b"haul listener", [&ours, &theirs]).as_bytes())?;
    stream.flush()
}

/// Recognizes the listening end.
pub fn as_connector(stream: &mut (impl Read + Write + ?Sized), secret: &Secret) -> io::Result<()> {
    let mut theirs = Nonce::default();
    stream.read_exact(&mut theirs)?;
    let ours = nonce()?;
    let answer = hash(secret, b"haul connector", [&theirs, &ours]);
    stream.write_all(&[&ours[..], answer.as_bytes()].concat())?;
    stream.flush()?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof)?;
    check(secret, b"haul listener", [&theirs, &ours], proof)
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    // Up to 256 bytes are always filled (getrandom(2)).
    getrandom(&mut nonce, GetRandomFlags::empty())?;
    Ok(nonce)
}

fn hash(secret: &Secret, role: &[u8], [listener, connector]: [&Nonce; 2]) -> blake3::Hash {
    blake3::keyed_hash(secret, &[role, listener, connector].concat())
}

fn check(secret: &Secret, role: &[u8], nonces: [&Nonce; 2], proof: [u8; 32]) -> io::Result<()> {
    // The comparison takes the same time for every proof.
    if hash(secret, role, nonces) == proof {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other end does not know the secret"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn only_the_same_secret_is_recognized() {
        let run = |one: Secret, other: Secret| {
            let (mut here, mut there) = UnixStream::pair().unwrap();
            let listener = thread::spawn(move || {
                let result = as_listener(&mut there, &one);
                drop(there);
                result
            });
            let connector = as_connector(&mut here, &other);
            drop(here);
            (listener.join().unwrap(), connector)
        };
        let (listener, connector) = run([1; 32], [1; 32]);
        assert!(listener.is_ok() && connector.is_ok());
        let (listener, connector) = run([1; 32], [2; 32]);
        assert!(listener.is_err() && connector.is_err());
    }

    /// What the listening end sends is not an answer to the listening end.
    #[test]
    fn an_answer_that_is_sent_back_is_refused() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let listener = thread::spawn(move || as_listener(&mut there, &[1; 32]));
        let mut nonce = [0; 32];
        here.read_exact(&mut nonce).unwrap();
        here.write_all(&[nonce, nonce].concat()).unwrap();
        assert!(listener.join().unwrap().is_err());
    }
}
