//! What kind of socket a descriptor is.

use crate::error::{Error, failed};
use rustix::net::{SocketType, sockopt};
use std::os::fd::AsFd;

/// A stream or a datagram socket; anything else, a listening one among them, is an error.
pub(crate) fn kind(socket: impl AsFd) -> Result<SocketType, Error> {
    let kind = sockopt::socket_type(&socket).map_err(|errno| failed("getsockopt SO_TYPE")(errno.into()))?;
    let listens = sockopt::socket_acceptconn(&socket)
        .map_err(|errno| failed("getsockopt SO_ACCEPTCONN")(errno.into()))?;
    match kind {
        _ if listens => Err(Error::WrongSocket { needed: "a connected socket", found: "a listening one" }),
        SocketType::STREAM | SocketType::DGRAM => Ok(kind),
        _ => Err(Error::WrongSocket { needed: "a stream or a datagram socket", found: "of another kind" }),
    }
}

/// Only a stream.
pub(crate) fn must_be_stream(kind: SocketType) -> Result<(), Error> {
    if kind == SocketType::STREAM {
        Ok(())
    } else {
        Err(Error::WrongSocket { needed: "a stream socket", found: "a datagram socket" })
    }
}
