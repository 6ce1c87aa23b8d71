//! The certificate, its key and the passwords, with their reload.
//!
//! Each event loop has its own references. A reload reads every file again; what is valid replaces
//! the former secret, and what is not leaves it in force.

use crate::config::{BasicAuth, Config, Tls};
use crate::error::Error;
use crate::passwords::Passwords;
use haul_server::secrets::read_secret;
use haul_server::tls::TlsSettings;
use rustls::ServerConfig;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

/// The certificate and the passwords.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// The TLS configuration; `None` without TLS.
    pub tls: Option<Arc<ServerConfig>>,
    /// The passwords; `None` if none is needed.
    pub passwords: Option<Arc<Passwords>>,
}

/// The secrets in force, for all event loops.
#[derive(Debug)]
pub struct SharedSecrets {
    secrets: Mutex<Secrets>,
    /// Counts the reloads, so that an event loop learns of one before its next request.
    version: AtomicU64,
}

impl SharedSecrets {
    /// The secrets of the start.
    pub fn new(secrets: Secrets) -> Self {
        Self { secrets: Mutex::new(secrets), version: AtomicU64::new(0) }
    }

    /// The number of reloads so far.
    pub fn version(&self) -> u64 {
        self.version.load(SeqCst)
    }

    /// A copy of the secrets.
    pub fn get(&self) -> Secrets {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts other secrets in force.
    pub fn set(&self, secrets: Secrets) {
        *self.secrets.lock().unwrap_or_else(PoisonError::into_inner) = secrets;
        self.version.fetch_add(1, SeqCst);
    }
}

impl Secrets {
    /// Reads the files that the configuration names.
    pub fn load(config: &Config) -> Result<Self, Error> {
        let root = &config.root;
        Ok(Self {
            tls: config.tls.as_ref().map(|tls| load_tls(tls, root)).transpose()?,
            passwords: config
                .basic_auth
                .as_ref()
                .map(|auth| load_passwords(auth, root))
                .transpose()?,
        })
    }

    /// Reads the certificate and its key again. After an error both stay in force.
    pub fn reload_tls(&mut self, tls: &Tls, root: &Path) -> Result<(), Error> {
        self.tls = Some(load_tls(tls, root)?);
        Ok(())
    }

    /// Reads the passwords again. After an error the passwords stay in force.
    pub fn reload_passwords(&mut self, auth: &BasicAuth, root: &Path) -> Result<(), Error> {
        let loaded = load_passwords(auth, root)?;
        // Unchanged passwords keep their verified logins.
        if !self.passwords.as_ref().is_some_and(|held| held.has_same_users(&loaded)) {
            self.passwords = Some(loaded);
        }
        Ok(())
    }
}

fn load_tls(tls: &Tls, root: &Path) -> Result<Arc<ServerConfig>, Error> {
    if is_below(&tls.key, root) {
        let (path, problem) = (tls.key.clone(), SERVED.into());
        return Err(Error::Server(haul_server::Error::Tls { path, problem }));
    }
    let mut settings = TlsSettings::new(&tls.certificate, &tls.key);
    settings.in_kernel = tls.in_kernel;
    settings.alpn = vec![b"http/1.1".to_vec()];
    Ok(settings.load()?)
}

fn load_passwords(auth: &BasicAuth, root: &Path) -> Result<Arc<Passwords>, Error> {
    let wrong = |problem| Error::Passwords { path: auth.file.clone(), problem };
    if is_below(&auth.file, root) {
        return Err(wrong(SERVED.into()));
    }
    let bytes = read_secret(&auth.file).map_err(wrong)?;
    let text = String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))?;
    Passwords::parse(&text).map(Arc::new).map_err(wrong)
}

const SERVED: &str = "it lies in the folder that is served: move it out";

/// Whether a client could read this file, by its own name or through a link to it.
fn is_below(path: &Path, root: &Path) -> bool {
    let (Ok(path), Ok(root)) = (path.canonicalize(), root.canonicalize()) else { return false };
    path.starts_with(root)
}
