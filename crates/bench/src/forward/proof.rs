//! Whether a way of forwarding copied, put to the proof with the forwarder in the middle.

use super::method::TestedForwardMethod;
use haul::{ForwardMethod, ForwardPool, ForwardSettings, Forwarder, SendMethod};
use haul_lab::{Lab, LabError};
use haul_sys::sockmap::Sockmap;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// The share that each way copied in the middle, where that could be found out.
///
/// Pages of a file are sent through the forwarder by `sendfile` and written over once they have all arrived behind
/// it: what then comes out changed was copied nowhere. The library's own choice copies what is small, as the proof's
/// bytes are, so it is judged by its own report instead.
pub(super) fn of(lab: &Lab, ways: &[TestedForwardMethod]) -> HashMap<TestedForwardMethod, f64> {
    ways.iter().filter_map(|&way| Some((way, copied_percent(lab, way).ok()??))).collect()
}

fn copied_percent(lab: &Lab, way: TestedForwardMethod) -> Result<Option<f64>, LabError> {
    let Some(middle) = Middle::of(way) else { return Ok(None) };
    let failed = |source| LabError::Step { step: "proving a copy".into(), source };
    // The client and the server are on one host, the forwarder's two ends on the other.
    let listener =
        lab.sender.run(|| TcpListener::bind((lab.sender.address(), 0)))?.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let client = lab.receiver.run(|| TcpStream::connect(address))?.map_err(failed)?;
    let (from, _) = listener.accept().map_err(failed)?;
    let (to, server) = lab.connect()?;
    let proved = thread::scope(|scope| {
        let ends = (from.try_clone().map_err(failed)?, to.try_clone().map_err(failed)?);
        let joined = match middle {
            Middle::Forwarder(settings) => {
                scope.spawn(move || {
                    let pool = ForwardPool::with(settings)?;
                    Forwarder::with_pool(&ends.0, &ends.1, pool)?.forward()
                });
                None
            }
            Middle::Kernel => Some(Sockmap::join(&from, &to).map_err(failed)?),
        };
        let proved = haul::prove(SendMethod::Sendfile, &client, &server).map_err(io::Error::other);
        drop(joined);
        for end in [&client, &server] {
            // Ends the forwarder, however far it came.
            let _ = end.shutdown(Shutdown::Both);
        }
        proved.map_err(failed)
    })?;
    Ok(Some(proved.copied_percent()))
}

/// Who passes the proof's bytes on.
enum Middle {
    Forwarder(ForwardSettings),
    Kernel,
}

impl Middle {
    fn of(way: TestedForwardMethod) -> Option<Self> {
        let by = |way| Some(Self::Forwarder(ForwardSettings { way, ..ForwardSettings::default() }));
        match way {
            TestedForwardMethod::Copy => by(ForwardMethod::Copy),
            TestedForwardMethod::Splice => by(ForwardMethod::Splice),
            TestedForwardMethod::Sockmap => Some(Self::Kernel),
            TestedForwardMethod::Auto => None,
        }
    }
}
