//! Log messages of `haul serve` on standard error, as plain lines or as JSON lines.
//!
//! Event loops log too and must not block on a slow reader of standard error. So a separate thread
//! writes the messages from a bounded queue, and messages that do not fit into the queue are lost.

use clap::ValueEnum;
use serde::Deserialize;
use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Maximum number of messages in the queue.
const QUEUE_MAX: usize = 1024;
/// The longest time for writing the queued messages when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The format of log messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageFormat {
    #[default]
    Text,
    Json,
}

/// The thread that writes messages to standard error. Dropping it first writes the queued messages.
#[derive(Debug)]
pub struct MessageWriter {
    queue: MessageQueue,
    /// Receives an item when the thread ends.
    done_rx: Receiver<()>,
}

/// The queue to the thread that writes. `None` ends the thread.
#[derive(Debug, Clone)]
struct MessageQueue(SyncSender<Option<Vec<u8>>>);

/// A message that is being formatted. It enters the queue when it is dropped.
struct MessageBuffer {
    bytes: Vec<u8>,
    queue: MessageQueue,
}

/// Formats an event as `haul: `, `warning: ` or `error: ` if it is one, and its message.
struct PlainFormat;

impl MessageWriter {
    /// Starts the thread and installs it as the process's global `tracing` subscriber.
    pub fn start(format: MessageFormat) -> io::Result<Self> {
        let (message_tx, message_rx) = sync_channel::<Option<Vec<u8>>>(QUEUE_MAX);
        let (done_tx, done_rx) = sync_channel(1);
        std::thread::Builder::new().name("haul-messages".into()).spawn(move || {
            while let Ok(Some(message)) = message_rx.recv() {
                // If standard error cannot be written, the error has no other destination.
                let _ = io::stderr().write_all(&message);
            }
            let _ = done_tx.send(());
        })?;
        let queue = MessageQueue(message_tx);
        let builder =
            tracing_subscriber::fmt().with_max_level(LevelFilter::INFO).with_writer(queue.clone());
        let installed = match format {
            MessageFormat::Text => {
                tracing::subscriber::set_global_default(builder.event_format(PlainFormat).finish())
            }
            MessageFormat::Json => {
                let json = builder.json().flatten_event(true).with_target(false);
                tracing::subscriber::set_global_default(json.finish())
            }
        };
        installed.map_err(io::Error::other)?;
        Ok(Self { queue, done_rx })
    }
}

impl Drop for MessageWriter {
    fn drop(&mut self) {
        // If standard error does not have a reader, the queue may stay full; its messages are then
        // lost.
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        while Instant::now() < deadline {
            if self.queue.0.try_send(None).is_ok() {
                let _: Result<(), RecvTimeoutError> = self.done_rx.recv_timeout(FLUSH_TIMEOUT);
                return;
            }
            std::thread::sleep(FLUSH_TIMEOUT / 100);
        }
    }
}

impl<'m> MakeWriter<'m> for MessageQueue {
    type Writer = MessageBuffer;

    fn make_writer(&'m self) -> MessageBuffer {
        MessageBuffer { bytes: Vec::new(), queue: self.clone() }
    }
}

impl Write for MessageBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MessageBuffer {
    fn drop(&mut self) {
        // A full queue: standard error does not have a reader, or messages come faster than it
        // reads.
        let _ = self.queue.0.try_send(Some(std::mem::take(&mut self.bytes)));
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>, F: for<'w> FormatFields<'w> + 'static>
    FormatEvent<S, F> for PlainFormat
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, F>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        struct MessageVisitor<'w, 'm>(&'w mut Writer<'m>, fmt::Result, &'static str);
        impl Visit for MessageVisitor<'_, '_> {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                // Other fields are for the JSON format; the message contains their values.
                if field.name() == "message" {
                    self.1 = writeln!(self.0, "haul: {}{value:?}", self.2);
                }
            }
        }
        let severity = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        let mut visitor = MessageVisitor(&mut writer, Ok(()), severity);
        event.record(&mut visitor);
        visitor.1
    }
}
