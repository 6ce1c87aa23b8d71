//! A file of users and bcrypt hashes of their passwords, as `htpasswd -B` writes it.
//!
//! bcrypt takes milliseconds to seconds on purpose, so no event loop calls [`Passwords::accept`]: a thread of its own does.
//! It knows no other kind of hash: those that web servers have used besides are broken within hours once the file is stolen.

use bcrypt::HashParts;
use haul_http::credentials::Credentials;
use lru::LruCache;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Users whose password need not be tried again.
const KNOWN_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// bcrypt's cost is a power of two: 16 takes about three seconds of a CPU for each login, and a wrong one too.
const COST_MAX: u32 = 16;

/// Users, and what their passwords must fit.
#[derive(Debug)]
pub struct Passwords {
    hashes: HashMap<String, String>,
    /// What the password of somebody unknown is tried with, so that it takes as long as anybody's.
    stranger: String,
    /// Hashes of the `Authorization` fields that were let in; for all loops, each of which asks here but once.
    known: Mutex<LruCache<blake3::Hash, ()>>,
}

impl Passwords {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut hashes = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |problem: &str| format!("line {}: {problem}", number + 1);
            let named = line.split_once(':').filter(|(user, _)| !user.is_empty());
            let (user, hash) = named.ok_or_else(|| wrong("it has no NAME:HASH"))?;
            let parts: HashParts = hash.parse().map_err(|_| {
                wrong("the hash is not bcrypt's ($2y$…): write it with htpasswd -B")
            })?;
            if !(4..=COST_MAX).contains(&parts.get_cost()) {
                return Err(wrong(&format!(
                    "its cost, {}, is not from 4 to {COST_MAX}",
                    parts.get_cost()
                )));
            }
            if hashes.insert(user.to_owned(), hash.to_owned()).is_some() {
                return Err(wrong(&format!("{user:?} is there already")));
            }
        }
        // `$2y$`, two digits of cost.
        let costliest = hashes.values().max_by_key(|hash| hash.get(4..6));
        let stranger =
            costliest.ok_or("there is nobody in it: add somebody with htpasswd -B")?.clone();
        Ok(Self { hashes, stranger, known: Mutex::new(LruCache::new(KNOWN_MAX)) })
    }

    /// Whether the same users have the same passwords there.
    pub fn has_same_users(&self, other: &Self) -> bool {
        self.hashes == other.hashes
    }

    /// Whether a field with this hash was let in already.
    pub fn knows(&self, field: &blake3::Hash) -> bool {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(field).is_some()
    }

    /// Notes that a field with this hash was let in.
    pub fn remember(&self, field: blake3::Hash) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).put(field, ());
    }

    /// Whether somebody is who he says. Takes as long as the hash's cost makes it, known or not.
    pub fn accept(&self, credentials: &Credentials) -> bool {
        let hash = self.hashes.get(&credentials.user);
        let fits =
            bcrypt::verify(&credentials.password, hash.unwrap_or(&self.stranger)).unwrap_or(false);
        fits && hash.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `htpasswd -nbB -C 4 ann sesame`.
    const ANN: &str = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG";

    #[test]
    fn users_are_who_their_passwords_say() {
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
    fn a_file_that_would_let_nobody_in_says_where() {
        let error = |text: &str| Passwords::parse(text).unwrap_err();
        assert!(error("").contains("nobody"));
        assert!(error(&format!("{ANN}\nbob")).contains("line 2"));
        assert!(error(ANN.trim_start_matches("ann")).contains("line 1"), "nobody has no name");
        assert!(error("bob:$apr1$abcdefgh$0123456789012345678901").contains("htpasswd -B"));
        assert!(error(&format!("{ANN}\n{ANN}")).contains("\"ann\" is there already"));
        assert!(error(&ANN.replace("$04$", "$31$")).contains("cost, 31"));
    }
}
