//! Lock step: one thread sends a batch over loopback, and then receives the batch.
//!
//! While the thread sends, the receiving end has nothing to do, so the time of the sending is the
//! cost of the sending alone. A batch lasts a few microseconds, so most batches run between two
//! interruptions even if other programs use the CPU. This needs no privileges and no second CPU.
//! In return the batch has to fit into the buffers of the sockets, and what the kernel does for an
//! arriving packet is part of the time of the send, as always on loopback.

use crate::tested_method::{AttachedTestedMethod, TestedMethod, TestedMethodError};
use crate::tls_records::{open_in_kernel, seal_in_kernel};
use crate::worker::Message;
use crate::worker::socket::SocketOptions;
use crate::workload::Piece;
use haul::{Error, MethodOptions};
use haul_units::Size;
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// The smallest batch. It fits into the buffers that an ordinary user may have with the kernel's
/// default limits (`net.core.wmem_max` is 208 KiB).
pub const BATCH_BYTES_MIN: u64 = 128 << 10;
/// The size of both sockets' buffers. The kernel grants less if its limits are lower.
const BUFFER_BYTES: usize = 4 << 20;
/// The bytes that one call receives.
const RECEIVE_BYTES: usize = 128 << 10;
/// The batches in which the kernel may enlarge the buffers of the sockets.
const WARM_UP_BATCHES_MAX: usize = 200;
/// How long a sent byte may take to arrive.
const ARRIVAL_MAX: Duration = Duration::from_secs(5);

/// Why lock step is not possible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockStepError {
    /// The two ends could not be connected.
    #[error("connecting over loopback: {0}")]
    Connect(String),
    /// The method failed, or does not exist here.
    #[error(transparent)]
    Send(#[from] TestedMethodError),
    /// The sockets do not hold a whole batch.
    #[error(
        "a batch of {batch} does not fit into the sockets' buffers (4MiB as root, else \
         net.ipv4.tcp_wmem and tcp_rmem)",
        batch = Size(*.0)
    )]
    DoesNotFit(u64),
    /// The batch did not arrive.
    #[error("receiving over loopback: {0}")]
    Receive(io::Error),
}

/// A connection over loopback, both ends of which belong to one thread. Several methods can use the
/// connection in turn, so that rows differ in nothing but their method.
pub struct LockStepConnection {
    stream: Arc<TcpStream>,
    receiver: TcpStream,
    sink: Box<[u8]>,
}

/// A method that sends over the connection, call by call.
pub struct BatchSender {
    method: AttachedTestedMethod,
    chunk_bytes: u64,
    batch_bytes: u64,
    /// The offset in the piece at which the next call begins.
    position: u64,
}

impl LockStepConnection {
    /// Connects the two ends.
    pub fn new(congestion: &str) -> Result<Self, LockStepError> {
        let (stream, receiver) = connect(congestion)?;
        receiver.set_read_timeout(Some(ARRIVAL_MAX)).map_err(LockStepError::Receive)?;
        // A send that would wait for the receiver would wait forever.
        stream.set_nonblocking(true).map_err(|error| LockStepError::Connect(error.to_string()))?;
        let sink = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Ok(Self { stream: Arc::new(stream), receiver, sink })
    }

    /// Makes the kernel encrypt what is sent, and decrypt what is received (kTLS).
    pub fn encrypt_in_kernel(&self) -> io::Result<()> {
        open_in_kernel(&self.receiver)?;
        seal_in_kernel(&self.stream)
    }

    /// Sets a method up. Each call of the method sends at most `chunk_bytes`.
    pub fn attach(
        &self,
        method: TestedMethod,
        chunk_bytes: u64,
        batch_bytes: u64,
    ) -> Result<BatchSender, LockStepError> {
        let options = MethodOptions::default().with_chunk_bytes(chunk_bytes as usize);
        let method = method.attach(&self.stream, &options, None)?;
        let batch_bytes = batch_bytes.max(chunk_bytes).max(BATCH_BYTES_MIN);
        Ok(BatchSender { method, chunk_bytes, batch_bytes, position: 0 })
    }

    /// Sends and receives until the sockets hold a whole batch.
    pub fn warm_up(
        &mut self,
        sender: &mut BatchSender,
        piece: &Piece,
    ) -> Result<(), LockStepError> {
        for _ in 0..WARM_UP_BATCHES_MAX {
            let sent = self.send(sender, piece)?;
            self.receive(sender, sent)?;
            if sent >= sender.batch_bytes {
                return Ok(());
            }
        }
        Err(LockStepError::DoesNotFit(sender.batch_bytes))
    }

    /// Sends the next batch of a piece, from its beginning again after its end. Returns the number
    /// of bytes, which is less than a batch if the sockets do not hold a batch.
    pub fn send(&mut self, sender: &mut BatchSender, piece: &Piece) -> Result<u64, LockStepError> {
        let mut sent = 0;
        while sent < sender.batch_bytes {
            if sender.position >= piece.len() {
                sender.position = 0;
            }
            let most = sender.chunk_bytes.min(sender.batch_bytes - sent);
            let end = piece.len().min(sender.position + most);
            match sender.method.send(self.stream.as_fd(), piece, sender.position..end) {
                Ok(bytes) => {
                    sender.position += bytes;
                    sent += bytes;
                }
                Err(error) if error.would_block() => break,
                Err(error) => {
                    // The bytes of this batch would arrive with the next batch.
                    self.receive_bytes(sent)?;
                    return Err(error.into());
                }
            }
        }
        Ok(sent)
    }

    /// Receives what was sent.
    pub fn receive(&mut self, sender: &mut BatchSender, bytes: u64) -> Result<(), LockStepError> {
        self.receive_bytes(bytes)?;
        // The kernel's notices about lent memory arrive with the acknowledgements.
        sender.method.process_completions(self.stream.as_fd()).map_err(TestedMethodError::from)?;
        Ok(())
    }

    fn receive_bytes(&mut self, bytes: u64) -> Result<(), LockStepError> {
        let mut left = bytes;
        while left > 0 {
            let most = self.sink.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match (&self.receiver).read(&mut self.sink[..most]) {
                Ok(0) => return Err(LockStepError::Receive(io::ErrorKind::UnexpectedEof.into())),
                Ok(received) => left -= received as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(LockStepError::Receive(io::ErrorKind::TimedOut.into()));
                }
                Err(error) => return Err(LockStepError::Receive(error)),
            }
        }
        Ok(())
    }
}

/// Two ends of a connection over loopback, with large buffers.
pub fn connect(congestion: &str) -> Result<(TcpStream, TcpStream), LockStepError> {
    let (from, to) = connect_with(congestion, Some(BUFFER_BYTES))?;
    let granted = rustix::net::sockopt::socket_send_buffer_size(&from);
    if granted.is_ok_and(|bytes| bytes >= BUFFER_BYTES) {
        return Ok((from, to));
    }
    // Without privileges a fixed size is at most net.core.wmem_max, which is often less than the
    // size to which the kernel enlarges a buffer by itself (net.ipv4.tcp_wmem).
    connect_with(congestion, None)
}

fn connect_with(
    congestion: &str,
    buffer_bytes: Option<usize>,
) -> Result<(TcpStream, TcpStream), LockStepError> {
    let message = |message: Message| match message {
        Message::Refused(reason) | Message::Failed(reason) => LockStepError::Connect(reason),
        message => LockStepError::Connect(format!("{message:?}")),
    };
    let failed = |error: io::Error| LockStepError::Connect(error.to_string());
    let options = SocketOptions { congestion: Some(congestion.into()), buffer_bytes };
    let listener = options.listen((Ipv4Addr::LOCALHOST, 0).into()).map_err(message)?;
    let address = listener.local_addr().map_err(failed)?;
    let from = options.connect(address).map_err(message)?;
    let own = from.local_addr().map_err(failed)?;
    loop {
        // Any process of this machine can connect to the listener.
        let (to, peer) = listener.accept().map_err(failed)?;
        if peer == own {
            return Ok((from, to));
        }
    }
}

impl TestedMethodError {
    /// Whether the socket does not take more bytes now.
    fn would_block(&self) -> bool {
        match self {
            Self::Library(error) => matches!(error, Error::WouldBlock),
            Self::Comparison(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::one_copy::OneCopyMethod;
    use crate::workload::Workload;
    use haul::SendMethod;

    #[test]
    fn every_method_of_the_ladder_sends_whole_batches() {
        let opened = "tmpfs:1MiB".parse::<Workload>().unwrap().open().unwrap();
        let mut lock_step = LockStepConnection::new("reno").unwrap();
        for method in [
            SendMethod::ReadWrite.into(),
            SendMethod::Sendfile.into(),
            SendMethod::Splice.into(),
            SendMethod::Floor.into(),
            TestedMethod::OneCopy(OneCopyMethod::MappedWrite),
        ] {
            let mut sender = lock_step.attach(method, 64 << 10, 0).unwrap();
            lock_step.warm_up(&mut sender, &opened.pieces[0]).unwrap();
            for _ in 0..20 {
                let sent = lock_step.send(&mut sender, &opened.pieces[0]).unwrap();
                assert_eq!(sent, BATCH_BYTES_MIN, "{method}");
                lock_step.receive(&mut sender, sent).unwrap();
            }
        }
    }

    #[test]
    fn a_batch_beyond_the_buffers_is_refused() {
        let opened = "tmpfs:64MiB".parse::<Workload>().unwrap().open().unwrap();
        let mut lock_step = LockStepConnection::new("reno").unwrap();
        let mut sender =
            lock_step.attach(SendMethod::Sendfile.into(), 64 << 10, 256 << 20).unwrap();
        let error = lock_step.warm_up(&mut sender, &opened.pieces[0]).unwrap_err().to_string();
        assert!(error.starts_with("a batch of 256MiB does not fit"), "{error}");
    }
}
