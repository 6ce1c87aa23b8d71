//! A password file: user names and bcrypt hashes, as `htpasswd -B` writes it.
//!
//! bcrypt takes milliseconds to seconds by design, so no event loop calls [`Passwords::accept`]: an
//! offload thread does. Other kinds of hashes are refused: those that web servers also use are
//! broken within hours once the file is stolen.

use bcrypt::HashParts;
use haul_http::credentials::Credentials;
use lru::LruCache;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// The number of accepted `Authorization` fields that need no new verification.
const ACCEPTED_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// The largest cost of a hash, as a power of two. 16 takes about three seconds of CPU time for each
/// verification, also of a wrong password.
const COST_MAX: u32 = 16;

/// The users and the hashes of their passwords.
#[derive(Debug)]
pub struct Passwords {
    hashes: HashMap<String, String>,
    /// The hash against which passwords of unknown users are verified, so that it takes as long as
    /// for a known user. It is the costliest of `hashes`.
    dummy_hash: String,
    /// Hashes of the `Authorization` fields that were accepted, for all event loops. Each loop
    /// looks up a field here only once.
    accepted: Mutex<LruCache<blake3::Hash, ()>>,
}

impl Passwords {
    /// Parses the text of a password file. An error in a line names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut hashes = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |problem: &str| format!("line {}: {problem}", number + 1);
            let named = line.split_once(':').filter(|(user, _)| !user.is_empty());
            let (user, hash) = named.ok_or_else(|| wrong("expected NAME:HASH"))?;
            let parts: HashParts = hash.parse().map_err(|_| {
                wrong("the hash is not a bcrypt hash ($2y$…): write it with htpasswd -B")
            })?;
            if !(4..=COST_MAX).contains(&parts.get_cost()) {
                return Err(wrong(&format!(
                    "the hash has a cost of {}, which is not from 4 to {COST_MAX}",
                    parts.get_cost()
                )));
            }
            if hashes.insert(user.to_owned(), hash.to_owned()).is_some() {
                return Err(wrong(&format!("user {user:?} is listed twice")));
            }
        }
        // A hash begins with `$2y$` and two digits of cost.
        let costliest = hashes.values().max_by_key(|hash| hash.get(4..6));
        let dummy_hash = costliest.ok_or("it has no users: add one with htpasswd -B")?.clone();
        Ok(Self { hashes, dummy_hash, accepted: Mutex::new(LruCache::new(ACCEPTED_MAX)) })
    }

    /// Whether `other` has the same users and hashes.
    pub fn has_same_users(&self, other: &Self) -> bool {
        self.hashes == other.hashes
    }

    /// Whether an `Authorization` field with this hash was accepted before.
    pub fn knows(&self, field: &blake3::Hash) -> bool {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner).get(field).is_some()
    }

    /// Records that an `Authorization` field with this hash was accepted.
    pub fn remember(&self, field: blake3::Hash) {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner).put(field, ());
    }

    /// Verifies a password. This takes as long for an unknown user as for a known one.
    pub fn accept(&self, credentials: &Credentials) -> bool {
        let hash = self.hashes.get(&credentials.user);
        let is_match = bcrypt::verify(&credentials.password, hash.unwrap_or(&self.dummy_hash))
            .unwrap_or(false);
        is_match && hash.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of `htpasswd -nbB -C 4 ann sesame`.
    const ANN: &str = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG";

    #[test]
    fn only_the_right_password_of_a_known_user_is_accepted() {
        let passwords = Passwords::parse(&format!("# staff\n\n{ANN}\r\n")).unwrap();
        let accepts = |user: &str, password: &str| {
            passwords.accept(&Credentials { user: user.into(), password: password.into() })
        };
        assert!(accepts("ann", "sesame"));
        assert!(!accepts("ann", "Sesame") && !accepts("ann", "") && !accepts("Ann", "sesame"));
        assert!(!accepts("", "") && !accepts("bob", "sesame"));
        assert!(!accepts("ann", &"sesame".repeat(100)));
    }

    #[test]
    fn an_invalid_file_is_refused_with_the_line_of_the_error() {
        let error = |text: &str| Passwords::parse(text).unwrap_err();
        assert!(error("").contains("no users"));
        assert!(error(&format!("{ANN}\nbob")).contains("line 2"));
        assert!(error(ANN.trim_start_matches("ann")).contains("line 1"), "the name is empty");
        assert!(error("bob:$apr1$abcdefgh$0123456789012345678901").contains("htpasswd -B"));
        assert!(error(&format!("{ANN}\n{ANN}")).contains("\"ann\" is listed twice"));
        assert!(error(&ANN.replace("$04$", "$31$")).contains("cost of 31"));
    }
}
