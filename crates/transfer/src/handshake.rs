//! The beginning of a session: both ends say who they are, and the end that the user started asks
//! for a transfer.

use crate::bring::{self, OwnProgram};
use crate::direct::{DirectAnswer, DirectRequest};
use crate::error::Error;
use crate::frame::{self, FrameReader};
use crate::options::Options;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};

/// The version of the protocol.
pub const VERSION: u32 = 5;
/// The first bytes of both streams. The version follows, in little-endian order.
const MAGIC: &[u8; 8] = b"haul\0xfr";
/// The most bytes of another program's output that an error shows.
const SHOWN_BYTES_MAX: usize = 200;

/// What the other end does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// It sends files.
    Source,
    /// It receives files.
    Destination,
}

/// What the user's end asks the other end for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// What the other end does.
    pub role: Role,
    /// The other end's paths: the sources, or the one destination. They travel in frames after the
    /// request, because there may be many.
    #[serde(skip)]
    pub paths: Vec<Vec<u8>>,
    /// The options.
    pub options: Options,
    /// What is asked for direct streams; `None`: everything goes through ssh.
    pub direct: Option<DirectRequest>,
    /// Whether the other end is a host of a chain, which passes on the content.
    pub is_chained: bool,
}

/// A part of the paths of a request.
#[derive(Debug, Serialize, Deserialize)]
struct Paths {
    paths: Vec<Vec<u8>>,
    is_last: bool,
}

/// The most bytes of paths in a frame, if there are several paths.
const PATHS_FRAME_BYTES: usize = 256 << 10;
/// The most bytes that the paths of a request take in memory.
const PATHS_BYTES_MAX: usize = 256 << 20;

/// What the other end answers to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// The transfer begins. If the request asks for direct streams, this is the answer.
    Begins(Option<DirectAnswer>),
    /// The request is refused, for this reason.
    Refuses(String),
}

/// Opens a session as the user's end. Returns the answer about direct streams, if the request asks
/// for them. If the other end is a shell, the shell gets a script that starts haul, or asks for
/// `own`.
pub fn ask(
    from: &mut impl Read,
    to: &mut impl Write,
    request: &Request,
    own: Option<&OwnProgram>,
) -> Result<Option<DirectAnswer>, Error> {
    if let Some(own) = own {
        to.write_all(&own.script(VERSION)).map_err(Error::Connection)?;
        to.flush().map_err(Error::Connection)?;
        // The shell must not read more than the script.
        let mut first = read_first(from)?;
        if bring::is_request(&first) {
            own.bring(from, to)?;
            first = read_first(from)?;
        }
        expect_greeting(first, from)?;
    }
    greet(to)?;
    frame::write(to, request, &[])?;
    write_paths(to, &request.paths)?;
    to.flush().map_err(Error::Connection)?;
    if own.is_none() {
        expect_greeting(read_first(from)?, from)?;
    }
    let mut frames = FrameReader::new(from);
    match frames.next()?.ok_or(Error::Protocol("nothing"))?.0 {
        Response::Begins(answer) => Ok(answer),
        Response::Refuses(reason) => Err(Error::Refused(reason)),
    }
}

/// Answers the request of the user's end.
pub fn respond(to: &mut impl Write, response: &Response) -> Result<(), Error> {
    frame::write(to, response, &[])?;
    to.flush().map_err(Error::Connection)
}

/// Opens a session as the end that was started for the user's end.
pub fn accept(from: &mut impl Read, to: &mut impl Write) -> Result<Request, Error> {
    greet(to)?;
    to.flush().map_err(Error::Connection)?;
    let mut first = read_first(from)?;
    if bring::is_script(&first) {
        bring::skip_script(from)?;
        first = read_first(from)?;
    }
    expect_greeting(first, from)?;
    let mut frames = FrameReader::new(from);
    let (mut request, _) = frames.next::<Request>()?.ok_or(Error::Protocol("nothing"))?;
    request.paths = read_paths(&mut frames)?;
    request.options.check()?;
    request.direct.as_ref().map_or(Ok(()), DirectRequest::check)?;
    Ok(request)
}

fn write_paths(to: &mut impl Write, paths: &[Vec<u8>]) -> Result<(), Error> {
    let mut part = Vec::new();
    let mut bytes = 0;
    for path in paths {
        if bytes + path.len() > PATHS_FRAME_BYTES && !part.is_empty() {
            let paths = std::mem::take(&mut part);
            frame::write(to, &Paths { paths, is_last: false }, &[])?;
            bytes = 0;
        }
        bytes += path.len() + 4;
        part.push(path.clone());
    }
    frame::write(to, &Paths { paths: part, is_last: true }, &[])
}

fn read_paths(frames: &mut FrameReader<impl Read>) -> Result<Vec<Vec<u8>>, Error> {
    let (mut all, mut bytes) = (Vec::new(), 0);
    loop {
        let (Paths { paths, is_last }, _) = frames.next()?.ok_or(Error::Protocol("nothing"))?;
        bytes += paths.iter().map(|path| path.len() + size_of::<Vec<u8>>()).sum::<usize>();
        if bytes > PATHS_BYTES_MAX {
            return Err(Error::Protocol("too many paths"));
        }
        all.extend(paths);
        if is_last {
            return Ok(all);
        }
    }
}

fn greet(to: &mut impl Write) -> Result<(), Error> {
    let greeting = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    to.write_all(&greeting).map_err(Error::Connection)
}

/// The first bytes of a stream: as many as [`MAGIC`] has, unless the stream ends before.
fn read_first(from: &mut impl Read) -> Result<Vec<u8>, Error> {
    let mut first = Vec::new();
    from.take(MAGIC.len() as u64).read_to_end(&mut first).map_err(Error::Connection)?;
    if first.is_empty() {
        return Err(Error::Connection(std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(first)
}

fn expect_greeting(mut magic: Vec<u8>, from: &mut impl Read) -> Result<(), Error> {
    if magic != MAGIC {
        // What else is here explains the failure. The other end may wait, so nothing more is
        // awaited.
        let mut more = [0; SHOWN_BYTES_MAX];
        let count = from.read(&mut more).unwrap_or(0);
        magic.extend_from_slice(&more[..count]);
        return Err(Error::NotHaul(String::from_utf8_lossy(&magic).trim_end().into()));
    }
    let mut version = [0; 4];
    from.read_exact(&mut version).map_err(Error::Connection)?;
    let theirs = u32::from_le_bytes(version);
    if theirs != VERSION {
        return Err(Error::Version { ours: VERSION, theirs });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_arrives() {
        let request = Request {
            role: Role::Destination,
            paths: vec![b"a\xff".to_vec()],
            options: Options::default(),
            direct: None,
            is_chained: false,
        };
        let (mut sent, mut answer) = (Vec::new(), Vec::new());
        accept(&mut &[][..], &mut answer).unwrap_err();
        respond(&mut answer, &Response::Begins(None)).unwrap();
        ask(&mut &answer[..], &mut sent, &request, None).unwrap();
        assert_eq!(accept(&mut &sent[..], &mut Vec::new()).unwrap(), request);
    }

    /// As by a key whose command sshd forces: the script of the user's end reaches haul.
    #[test]
    fn a_script_before_the_request_is_skipped() {
        let request = Request {
            role: Role::Source,
            paths: vec![b"a".to_vec(), vec![b'b'; PATHS_FRAME_BYTES], b"c".to_vec()],
            options: Options::default(),
            direct: None,
            is_chained: false,
        };
        let own = OwnProgram::open(std::sync::Arc::new(|_: &str| {})).unwrap();
        let (mut sent, mut answer) = (Vec::new(), Vec::new());
        accept(&mut &[][..], &mut answer).unwrap_err();
        respond(&mut answer, &Response::Refuses("why".into())).unwrap();
        let error = ask(&mut &answer[..], &mut sent, &request, Some(&own)).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
        assert_eq!(accept(&mut &sent[..], &mut Vec::new()).unwrap(), request);
    }

    #[test]
    fn a_talking_shell_and_another_version_are_told() {
        let ask = |answer: &[u8]| {
            let request = Request {
                role: Role::Source,
                paths: vec![],
                options: Options::default(),
                direct: None,
                is_chained: false,
            };
            ask(&mut &answer[..], &mut Vec::new(), &request, None).unwrap_err().to_string()
        };
        assert!(ask(b"Welcome to example.com!\n").contains("\"Welcome to example.com!\""));
        assert!(ask(&[&MAGIC[..], &[9, 0, 0, 0]].concat()).contains("version 9"));
        assert!(ask(b"").contains("the connection to the other end failed"));
    }
}
