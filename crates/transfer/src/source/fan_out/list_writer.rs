//! Writes the lists of a session to all hosts.

use super::broadcast::Broadcast;
use super::members::Members;
use crate::error::Error;
use crate::message::{Entry, Kind, Listed, ToDestination};
use crate::source::frame_writer::FrameWriter;

/// Writes the lists of a session to all hosts.
#[derive(Clone, Copy)]
pub struct ListWriter<'m, 's> {
    pub broadcast: &'m Broadcast,
    pub members: &'m Members<'s>,
}

impl FrameWriter for ListWriter<'_, '_> {
    fn write_frame(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error> {
        if !data.is_empty() {
            return Err(Error::Protocol("content in a list of this end"));
        }
        if let ToDestination::List(listed) = message {
            let is_file = |item: &&Listed| {
                matches!(item, Listed::Entry(Entry { kind: Kind::File { .. }, .. }))
            };
            // Before the hosts answer.
            self.members.add_list(listed.iter().filter(is_file).count() as u32);
        }
        self.broadcast.send(message)
    }

    fn write_compressed_frame(
        &mut self,
        message: &ToDestination,
        data: &[u8],
    ) -> Result<(), Error> {
        self.write_frame(message, data)
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
