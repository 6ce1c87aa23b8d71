//! Resources: a file with the representations in which it can be sent.

use crate::files::object::Object;
use haul_http::encoding::{self, Coding};
use haul_http::list_field::ListField;
use std::sync::Arc;

/// A file and its precompressed variants in the same directory.
#[derive(Debug)]
pub struct Resource {
    /// The file without a content coding.
    pub identity: Arc<Representation>,
    /// The precompressed files.
    pub encoded: Vec<(Coding, Arc<Representation>)>,
    /// Whether it is the fallback, which is sent for targets that name no file. It is not cached by
    /// its target, as the number of such targets is unlimited.
    pub is_fallback: bool,
}

/// A representation of a resource (RFC 9110 section 3.2).
#[derive(Debug)]
pub struct Representation {
    /// The file.
    pub object: Object,
    /// The media type.
    pub content_type: Box<str>,
    /// The field lines of every successful response (200, 206, 304).
    pub fields: Box<[u8]>,
}

impl Resource {
    /// The representation for a client that accepts these codings.
    pub fn choose(&self, accepted: &ListField<'_>) -> &Arc<Representation> {
        if self.encoded.is_empty() {
            return &self.identity;
        }
        let chosen = encoding::choose(accepted, self.encoded.iter().map(|(coding, _)| *coding));
        let found = self.encoded.iter().find(|(coding, _)| Some(*coding) == chosen);
        found.map_or(&self.identity, |(_, representation)| representation)
    }

    /// The memory that it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.representations()
            .map(|each| each.object.memory_bytes() + each.fields.len() + 512)
            .sum()
    }

    /// Whether this server may keep the resource in its own cache and send it to later requests.
    /// False if the version of one of its files is ambiguous.
    pub fn is_cacheable(&self) -> bool {
        self.representations().all(|each| each.object.is_cacheable())
    }

    /// Whether none of its files has changed.
    pub fn is_current(&self) -> bool {
        self.representations().all(|each| each.object.is_current())
    }

    /// The number of open descriptors.
    pub fn descriptors(&self) -> usize {
        1 + self.encoded.len()
    }

    fn representations(&self) -> impl Iterator<Item = &Arc<Representation>> {
        std::iter::once(&self.identity).chain(self.encoded.iter().map(|(_, each)| each))
    }
}
