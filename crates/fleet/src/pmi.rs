//! PMI-1: the protocol by which a launcher's process manager lets ranks exchange short texts.
//!
//! The launcher leaves a socket open in each rank and names its descriptor in `PMI_FD`. Requests
//! and answers are lines of `key=value` words. `srun --mpi=pmi2` and Hydra speak the protocol, and
//! no library is needed. The launcher protects the exchange between hosts, so no secret goes
//! through PMI.
//!
//! The source of the protocol is `src/pmi/simple/simple_pmi.c` of MPICH.

use crate::error::Error;
use rustix::net::sockopt;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The longest value that all process managers accept (`PMI_MAXVALLEN` of MPICH).
pub const VALUE_BYTES_MAX: usize = 1024;
/// The longest line of an answer. A value and a few short words fit.
const LINE_BYTES_MAX: u64 = 8192;
/// The time for one answer. All ranks must arrive before the answer to a barrier.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// A client of the process manager.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
    /// The name of the space for keys and values of this job.
    space: String,
}

impl Client {
    /// Starts the session of PMI-1 on a socket.
    pub fn start(socket: OwnedFd) -> Result<Self, Error> {
        // Hydra and Slurm leave a Unix socket or a TCP socket. Reads and writes are the same for
        // both.
        let stream = TcpStream::from(socket);
        let timeout = Some(ANSWER_TIMEOUT);
        sockopt::set_socket_timeout(&stream, sockopt::Timeout::Recv, timeout)
            .and_then(|()| sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, timeout))
            .map_err(|errno| Error::Pmi(std::io::Error::from(errno).to_string()))?;
        let mut client = Self { stream: BufReader::new(stream), space: String::new() };
        client.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let maxes = client.ask("cmd=get_maxes", "maxes")?;
        let value_bytes_max = maxes.get("vallen_max").and_then(|max| max.parse().ok());
        if value_bytes_max.is_some_and(|max: usize| max < VALUE_BYTES_MAX) {
            return Err(Error::Pmi(format!("values have fewer than {VALUE_BYTES_MAX} bytes")));
        }
        let answer = client.ask("cmd=get_my_kvsname", "my_kvsname")?;
        client.space = answer.get("kvsname").cloned().unwrap_or_default();
        Ok(client)
    }

    /// Sends a value of this rank to all ranks, and returns the values of all ranks. Waits for the
    /// last rank. The value must not contain a space.
    pub fn exchange(&mut self, rank: u32, size: u32, value: &str) -> Result<Vec<String>, Error> {
        let space = self.space.clone();
        self.ask(&format!("cmd=put kvsname={space} key=haul-{rank} value={value}"), "put_result")?;
        self.ask("cmd=barrier_in", "barrier_out")?;
        let mut values = Vec::new();
        for other in 0..size {
            let request = format!("cmd=get kvsname={space} key=haul-{other}");
            let answer = self.ask(&request, "get_result")?;
            let value = answer.get("value").cloned();
            values.push(value.ok_or_else(|| Error::Pmi(format!("rank {other} has no value")))?);
        }
        Ok(values)
    }

    /// Ends the session.
    pub fn end(mut self) -> Result<(), Error> {
        self.ask("cmd=finalize", "finalize_ack").map(drop)
    }

    /// Sends a request and reads the answer, which must be of this kind and a success.
    fn ask(&mut self, request: &str, kind: &str) -> Result<HashMap<String, String>, Error> {
        let failed = |error: std::io::Error| Error::Pmi(error.to_string());
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes()).map_err(failed)?;
        let mut line = Vec::new();
        Read::take(&mut self.stream, LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)
            .map_err(failed)?;
        let line = String::from_utf8_lossy(&line);
        let Some(line) = line.strip_suffix('\n') else {
            return Err(Error::Pmi("the connection ended in the middle of an answer".into()));
        };
        let answer = parse(line);
        let is_kind = answer.get("cmd").is_some_and(|cmd| cmd == kind);
        let is_success = answer.get("rc").is_none_or(|code| code == "0");
        if is_kind && is_success {
            return Ok(answer);
        }
        let command = request.split(' ').next().unwrap_or_default();
        Err(Error::Pmi(format!("the answer to {command} was {line:?}")))
    }
}

/// The words of a line. A later word of the same key counts. In an answer of Slurm, a text with
/// spaces may be the last value.
pub fn parse(line: &str) -> HashMap<String, String> {
    let words = line.split(' ').filter_map(|word| word.split_once('='));
    words.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    /// A process manager of two ranks that answers these lines.
    fn client(answers: &'static [&'static str]) -> Result<Vec<String>, Error> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let manager = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream);
            let mut requests = Vec::new();
            for answer in answers {
                let mut line = String::new();
                lines.read_line(&mut line).unwrap();
                requests.push(line);
                lines.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            requests
        });
        let socket = TcpStream::connect(address).unwrap();
        let values = Client::start(socket.into()).and_then(|mut client| {
            let values = client.exchange(1, 2, "b")?;
            client.end()?;
            Ok(values)
        });
        drop(manager.join());
        values
    }

    #[test]
    fn values_of_all_ranks_arrive() {
        let values = client(&[
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
            "cmd=maxes rc=0 kvsname_max=256 keylen_max=256 vallen_max=1024\n",
            "cmd=my_kvsname rc=0 kvsname=2.0\n",
            "cmd=put_result rc=0 msg=success\n",
            "cmd=barrier_out rc=0\n",
            "cmd=get_result rc=0 msg=success value=a\n",
            "cmd=get_result rc=0 msg=success value=b\n",
            "cmd=finalize_ack rc=0\n",
        ]);
        assert_eq!(values.unwrap(), ["a", "b"]);
    }

    #[test]
    fn another_answer_is_an_error_with_the_answer() {
        for answer in ["cmd=put_result rc=0\n", "cmd=response_to_init rc=-1\n", "x\n", "cmd=re"] {
            let answers = Box::leak(Box::new([answer]));
            let error = client(answers).unwrap_err().to_string();
            assert!(error.starts_with("the launcher's process manager (PMI): "), "{error}");
        }
    }
}
