//! What `haul serve` says of itself while it runs, on standard error: lines for people, or JSON for programs.
//!
//! Event loops speak, too, and must not wait for whoever reads: a thread writes, and what it cannot keep up with is lost.

use clap::ValueEnum;
use serde::Deserialize;
use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Messages that wait to be written.
const WAITING_MAX: usize = 1024;
/// How long the last ones may take.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How messages are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageFormat {
    #[default]
    Text,
    Json,
}

/// The thread that writes; what has been said is written before this is gone.
#[derive(Debug)]
pub struct Messages {
    sink: Sink,
    end: Receiver<()>,
}

/// Where messages go: `None` is the last.
#[derive(Debug, Clone)]
struct Sink(SyncSender<Option<Vec<u8>>>);

/// A message that is being put together.
struct Message {
    bytes: Vec<u8>,
    sink: Sink,
}

/// `haul: ` and the message itself.
struct ForPeople;

impl Messages {
    /// From here on everything of this process that speaks by `tracing` is written to standard error.
    pub fn start(format: MessageFormat) -> io::Result<Self> {
        let (sink, messages) = sync_channel::<Option<Vec<u8>>>(WAITING_MAX);
        let (end_out, end) = sync_channel(1);
        std::thread::Builder::new().name("haul-messages".into()).spawn(move || {
            while let Ok(Some(message)) = messages.recv() {
                // Nobody is left to be told that nobody listens.
                let _ = io::stderr().write_all(&message);
            }
            let _ = end_out.send(());
        })?;
        let sink = Sink(sink);
        let builder =
            tracing_subscriber::fmt().with_max_level(LevelFilter::INFO).with_writer(sink.clone());
        let is_first = match format {
            MessageFormat::Text => {
                tracing::subscriber::set_global_default(builder.event_format(ForPeople).finish())
            }
            MessageFormat::Json => {
                let json = builder.json().flatten_event(true).with_target(false);
                tracing::subscriber::set_global_default(json.finish())
            }
        };
        is_first.map_err(io::Error::other)?;
        Ok(Self { sink, end })
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        // Where nobody reads standard error it may stay full, and then what is in it is lost.
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until {
            if self.sink.0.try_send(None).is_ok() {
                let _: Result<(), RecvTimeoutError> = self.end.recv_timeout(LAST_WORDS);
                return;
            }
            std::thread::sleep(LAST_WORDS / 100);
        }
    }
}

impl<'m> MakeWriter<'m> for Sink {
    type Writer = Message;

    fn make_writer(&'m self) -> Message {
        Message { bytes: Vec::new(), sink: self.clone() }
    }
}

impl Write for Message {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // Full: nobody reads standard error, or too much happens to be read.
        let _ = self.sink.0.try_send(Some(std::mem::take(&mut self.bytes)));
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>, F: for<'w> FormatFields<'w> + 'static>
    FormatEvent<S, F> for ForPeople
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, F>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        struct Words<'w, 'm>(&'w mut Writer<'m>, fmt::Result);
        impl Visit for Words<'_, '_> {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                // Fields are for programs; the message says the same in words.
                if field.name() == "message" {
                    self.1 = writeln!(self.0, "haul: {value:?}");
                }
            }
        }
        let mut words = Words(&mut writer, Ok(()));
        event.record(&mut words);
        words.1
    }
}
