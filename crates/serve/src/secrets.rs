//! What a service reads that nobody else should: its certificate's key, and its users' passwords.
//!
//! Each loop has a copy of the references. Told to reload, a service reads everything again; what is good holds from then on,
//! and what is not stays as it was.

use crate::config::{BasicAuth, Config, Tls};
use crate::error::Error;
use crate::event_loop::tls;
use crate::passwords::Passwords;
use rustix::fs::{Mode, OFlags};
use rustls::ServerConfig;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest file of any of these, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a service reads that nobody else should.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// Who to say that one is, where TLS is spoken.
    pub tls: Option<Arc<ServerConfig>>,
    /// Who may ask, where not everybody may.
    pub passwords: Option<Arc<Passwords>>,
}

impl Secrets {
    /// Reads what `config` names.
    pub fn load(config: &Config) -> Result<Self, Error> {
        Ok(Self {
            tls: config.tls.as_ref().map(|tls| load_tls(tls, &config.root)).transpose()?,
            passwords: config
                .basic_auth
                .as_ref()
                .map(|auth| load_passwords(auth, &config.root))
                .transpose()?,
        })
    }

    /// Reads it again. What cannot be read stays as it was, and is told.
    pub fn load_again(&mut self, config: &Config) -> Vec<Error> {
        let mut wrong = Vec::new();
        if let Some(tls) = &config.tls {
            match load_tls(tls, &config.root) {
                Ok(fresh) => self.tls = Some(fresh),
                Err(error) => wrong.push(error),
            }
        }
        if let Some(auth) = &config.basic_auth {
            match load_passwords(auth, &config.root) {
                // Whoever was let in by the same passwords need not show his again.
                Ok(fresh)
                    if self.passwords.as_ref().is_some_and(|held| held.has_same_users(&fresh)) => {}
                Ok(fresh) => self.passwords = Some(fresh),
                Err(error) => wrong.push(error),
            }
        }
        wrong
    }
}

fn load_tls(tls: &Tls, root: &Path) -> Result<Arc<ServerConfig>, Error> {
    if is_below(&tls.key, root) {
        return Err(Error::Tls { path: tls.key.clone(), problem: SERVED.into() });
    }
    let read =
        |path: &PathBuf| read(path).map_err(|problem| Error::Tls { path: path.clone(), problem });
    tls::configure(tls, &read(&tls.certificate)?, &read(&tls.key)?)
}

fn load_passwords(auth: &BasicAuth, root: &Path) -> Result<Arc<Passwords>, Error> {
    let wrong = |problem| Error::Passwords { path: auth.file.clone(), problem };
    if is_below(&auth.file, root) {
        return Err(wrong(SERVED.into()));
    }
    let text = String::from_utf8(read(&auth.file).map_err(wrong)?)
        .map_err(|error| wrong(error.to_string()))?;
    Passwords::parse(&text).map(Arc::new).map_err(wrong)
}

const SERVED: &str = "it lies in the folder that is served: move it out";

/// Whether clients could come to read this file, by its own name or by a link to it.
fn is_below(path: &Path, root: &Path) -> bool {
    let (Ok(path), Ok(root)) = (path.canonicalize(), root.canonicalize()) else { return false };
    path.starts_with(root)
}

/// Reads a regular file: anything else, such as a pipe without a writer, could hold us up.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(std::io::Error::from);
    let file = File::from(opened.map_err(|error| error.to_string())?);
    if !file.metadata().is_ok_and(|about| about.is_file()) {
        return Err("it is no regular file".into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it is larger than {FILE_BYTES_MAX} B"));
    }
    Ok(bytes)
}
