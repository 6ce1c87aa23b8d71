//! The copy proof of forward methods: it sends through a forwarder between the two sockets of the
//! proof.

use super::method::TestedForwardMethod;
use haul::{ForwardMethod, ForwardPool, ForwardSettings, Forwarder, SendMethod};
use haul_lab::{Lab, LabError};
use haul_lab_sys::sockmap::Sockmap;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// The share of the bytes in percent that each forward method copied, for the methods that the
/// proof supports.
///
/// The proof sends pages of a file through the forwarder with `sendfile`, waits until the
/// receiver's kernel has all of them, and overwrites the file. Bytes that then arrive changed were
/// never copied. The library's choice copies small amounts, such as the pages of the proof, so the
/// library's report is used for this row.
pub(super) fn copied_percents(
    lab: &Lab,
    methods: &[TestedForwardMethod],
) -> HashMap<TestedForwardMethod, f64> {
    methods
        .iter()
        .filter_map(|&method| Some((method, copied_percent(lab, method).ok()??)))
        .collect()
}

fn copied_percent(lab: &Lab, method: TestedForwardMethod) -> Result<Option<f64>, LabError> {
    let Some(forwarder) = ProofForwarder::of(method) else { return Ok(None) };
    let failed = |error| LabError::Step { step: "proving a copy".into(), error };
    // The client and the server run on one host, the two sockets of the forwarder on the other.
    let listener =
        lab.sender.run(|| TcpListener::bind((lab.sender.address(), 0)))?.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let client = lab.receiver.run(|| TcpStream::connect(address))?.map_err(failed)?;
    let (from, _) = listener.accept().map_err(failed)?;
    let (to, server) = lab.connect()?;
    let proof = thread::scope(|scope| {
        let ends = (from.try_clone().map_err(failed)?, to.try_clone().map_err(failed)?);
        let joined = match forwarder {
            ProofForwarder::Library(settings) => {
                scope.spawn(move || {
                    let pool = ForwardPool::with_settings(settings)?;
                    Forwarder::with_pool(&ends.0, &ends.1, pool)?.forward()
                });
                None
            }
            ProofForwarder::Kernel => Some(Sockmap::join(&from, &to).map_err(failed)?),
        };
        let proof = haul::prove(SendMethod::Sendfile, &client, &server).map_err(io::Error::other);
        drop(joined);
        for end in [&client, &server] {
            // Ends the forwarder, even if it has not forwarded everything.
            let _ = end.shutdown(Shutdown::Both);
        }
        proof.map_err(failed)
    })?;
    Ok(Some(proof.copied_percent()))
}

/// The forwarder of the proof's bytes.
enum ProofForwarder {
    Library(ForwardSettings),
    Kernel,
}

impl ProofForwarder {
    fn of(method: TestedForwardMethod) -> Option<Self> {
        let library = |method| Some(Self::Library(ForwardSettings::default().with_method(method)));
        match method {
            TestedForwardMethod::Copy => library(ForwardMethod::Copy),
            TestedForwardMethod::Splice => library(ForwardMethod::Splice),
            TestedForwardMethod::Sockmap => Some(Self::Kernel),
            // Decryption writes the plaintext into memory of its own.
            TestedForwardMethod::Auto
            | TestedForwardMethod::TlsCopy
            | TestedForwardMethod::KtlsCopy
            | TestedForwardMethod::KtlsSplice => None,
        }
    }
}
