//! The connection from one host of a chain to the next host.

use crate::chain::frame_queue::{Body, Frame, FrameQueue, Next};
use crate::direct::{DataStream, DirectRequest, DirectWriter, STREAM_BYTES_MAX, Successor};
use crate::error::Error;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time in which a connection that failed is opened again.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// The interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The connection to the next host.
#[derive(Debug)]
pub struct Link {
    request: DirectRequest,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The next host; `None` if this host is the last.
    successor: Option<Successor>,
    /// The socket, to interrupt a sender that waits.
    socket: Option<TcpStream>,
    /// Why the next host cannot be reached.
    failure: Option<String>,
}

impl Link {
    /// A link that waits for its first order.
    pub fn new(request: DirectRequest) -> Self {
        Self { request, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the next host.
    pub fn order(&self, queue: &FrameQueue, successor: Option<Successor>) {
        let mut state = self.state();
        state.failure = None;
        state.successor = successor;
        if let Some(socket) = state.socket.take() {
            // An error means that the next host closed the connection.
            let _ = socket.shutdown(Shutdown::Both);
        }
        queue.change_order();
    }

    /// Ends the session.
    pub fn close(&self, queue: &FrameQueue) {
        queue.close();
        if let Some(socket) = self.state().socket.take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Why the next host of the present order cannot be reached.
    pub fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    /// Sends the frames of the queue to the next host, until the session ends.
    pub fn run(&self, queue: &FrameQueue) {
        loop {
            let (order, successor) = {
                // An order changes both under this lock.
                let state = self.state();
                (queue.order(), state.successor.clone())
            };
            let failure = successor.and_then(|successor| self.serve(queue, order, &successor));
            if failure.is_some() && queue.order() == order {
                self.state().failure = failure;
            }
            if !queue.wait_for_order(order, None) {
                return;
            }
        }
    }

    /// Sends frames until there is another order. Returns the reason if the host cannot be reached.
    fn serve(&self, queue: &FrameQueue, order: u64, successor: &Successor) -> Option<String> {
        let mut failing_since = Instant::now();
        loop {
            let begun = Instant::now();
            let result = self.connect_and_send(queue, order, successor);
            if queue.order() != order {
                return None;
            }
            let reason = match result {
                Ok(true) => {
                    failing_since = Instant::now();
                    continue;
                }
                Ok(false) => return None,
                Err(error) => error.to_string(),
            };
            // A connection that carried frames for a while is opened again at once.
            if begun.elapsed() > CONNECT_TIME_MAX {
                failing_since = Instant::now();
            }
            if failing_since.elapsed() > CONNECT_TIME_MAX {
                return Some(reason);
            }
            if !queue.wait_for_order(order, Some(RETRY_INTERVAL)) {
                return None;
            }
        }
    }

    /// Sends through one connection. True if the connection carried as much as it may, and false if
    /// there is another order.
    fn connect_and_send(
        &self,
        queue: &FrameQueue,
        order: u64,
        successor: &Successor,
    ) -> io::Result<bool> {
        let mut stream = DataStream::connect_to(&self.request, successor)?;
        let socket = stream.socket()?;
        {
            let mut state = self.state();
            if queue.order() != order {
                return Ok(false);
            }
            state.socket = Some(socket);
        }
        let number = stream.receive_number()?;
        if !queue.begin(number) {
            return Err(io::Error::other("it lacks frames that this host forgot"));
        }
        let mut writer = stream.into_writer();
        let mut bytes_left = STREAM_BYTES_MAX;
        while bytes_left > 0 {
            let Next::Send(frame) = queue.next(order) else { return Ok(false) };
            write(&mut writer, &frame).map_err(io::Error::other)?;
            queue.end_send(order);
            bytes_left = bytes_left.saturating_sub(frame.body.bytes());
        }
        Ok(true)
    }
}

fn write(writer: &mut DirectWriter, frame: &Frame) -> Result<(), Error> {
    match &frame.body {
        Body::Memory(data) => writer.write_parts(&frame.head, data),
        Body::File(open, range) => {
            writer.write_head_and_file(&frame.head, &open.file, range.clone())
        }
    }
}
