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
    /// The number of the present order.
    order: u64,
    /// Why the next host of the present order cannot be reached.
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

    /// Changes the next host by an order with this number.
    pub fn order(&self, queue: &FrameQueue, order: u64, successor: Option<Successor>) {
        let mut state = self.state();
        (state.order, state.failure) = (order, None);
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

    /// The number of the present order, and why its host cannot be reached.
    pub fn failure(&self) -> Option<(u64, String)> {
        let state = self.state();
        state.failure.clone().map(|failure| (state.order, failure))
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
            if failure.is_some() {
                let mut state = self.state();
                // Another order changes both under this lock.
                if queue.order() == order {
                    state.failure = failure;
                }
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
            let mut frames = 0;
            let result = self.connect_and_send(queue, order, successor, &mut frames);
            if queue.order() != order {
                return None;
            }
            if frames > 0 {
                failing_since = Instant::now();
            }
            let reason = match result {
                Ok(true) => continue,
                Ok(false) => return None,
                Err(error) => error.to_string(),
            };
            if failing_since.elapsed() > CONNECT_TIME_MAX {
                return Some(reason);
            }
            if !queue.wait_for_order(order, Some(RETRY_INTERVAL)) {
                return None;
            }
        }
    }

    /// Sends through one connection, and counts the frames. True if the connection carried as much
    /// as it may, and false if there is another order.
    fn connect_and_send(
        &self,
        queue: &FrameQueue,
        order: u64,
        successor: &Successor,
        frames: &mut u64,
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
            let Next::Send(number, frame) = queue.next(order) else { return Ok(false) };
            write(&mut writer, number, &frame).map_err(io::Error::other)?;
            queue.end_send(order, number);
            *frames += 1;
            bytes_left = bytes_left.saturating_sub(frame.body.bytes());
        }
        Ok(true)
    }
}

/// Writes the number of a frame and the frame.
fn write(writer: &mut DirectWriter, number: u64, frame: &Frame) -> Result<(), Error> {
    let head = [&number.to_le_bytes()[..], &frame.head].concat();
    match &frame.body {
        Body::Memory(data) => writer.write_parts(&head, data),
        Body::File(open, range) => writer.write_head_and_file(&head, &open.file, range.clone()),
    }
}
