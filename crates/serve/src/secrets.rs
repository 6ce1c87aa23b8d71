//! What a service reads that nobody else should: its certificate's key, and its users' passwords.
//!
//! Each loop has a copy of the references. Told to reload, a service reads everything again, and only where all of it is
//! good do the loops get it.

use crate::config::Config;
use crate::error::Error;
use crate::event_loop::tls;
use crate::passwords::Passwords;
use rustls::ServerConfig;
use std::path::{Component, Path};
use std::sync::Arc;

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
        let tls = config.tls.as_ref().map(tls::load).transpose()?;
        let passwords = match &config.basic_auth {
            None => None,
            Some(auth) => {
                let wrong = |problem| Error::Passwords { path: auth.file.clone(), problem };
                if is_served(&auth.file, config) {
                    return Err(wrong("it lies in the folder that is served: move it out".into()));
                }
                Some(Arc::new(Passwords::load(&auth.file).map_err(wrong)?))
            }
        };
        Ok(Self { tls, passwords })
    }
}

/// Whether clients could read this file themselves.
fn is_served(path: &Path, config: &Config) -> bool {
    let (Ok(path), Ok(root)) = (path.canonicalize(), config.root.canonicalize()) else { return false };
    let Ok(below) = path.strip_prefix(root) else { return false };
    let is_hidden = |part: Component<'_>| {
        let name = part.as_os_str().as_encoded_bytes();
        name.starts_with(b".") && name != b".well-known"
    };
    config.content.hidden || !below.components().any(is_hidden)
}
