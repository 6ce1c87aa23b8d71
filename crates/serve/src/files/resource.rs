//! What a target stands for: a file, with the forms it can be sent in.

use crate::files::object::Object;
use haul_http::encoding::{self, Coding};
use haul_http::request::ListField;
use std::sync::Arc;

/// A file and the compressed forms of it that lie beside it.
#[derive(Debug)]
pub struct Resource {
    /// The file itself.
    pub plain: Arc<Representation>,
    /// Compressed forms.
    pub coded: Vec<(Coding, Arc<Representation>)>,
    /// Whether it stands for targets that name nothing: there is no end of those.
    pub is_fallback: bool,
}

/// One form of a resource (RFC 9110 section 3.2).
#[derive(Debug)]
pub struct Representation {
    /// The file that holds it.
    pub object: Object,
    /// Its media type.
    pub content_type: Box<str>,
    /// Lines that every successful response about it has (200, 206, 304).
    pub fields: Box<[u8]>,
}

impl Resource {
    /// The form to send to a client that accepts these codings.
    pub fn choose(&self, accepted: &ListField<'_>) -> &Arc<Representation> {
        if self.coded.is_empty() {
            return &self.plain;
        }
        let chosen = encoding::choose(accepted, self.coded.iter().map(|(coding, _)| *coding));
        let found = self.coded.iter().find(|(coding, _)| Some(*coding) == chosen);
        found.map_or(&self.plain, |(_, representation)| representation)
    }

    /// Memory that it takes, in bytes, beside descriptors.
    pub fn memory_bytes(&self) -> usize {
        self.forms().map(|form| form.object.memory_bytes() + form.fields.len() + 512).sum()
    }

    /// Whether it may be kept and sent to others.
    pub fn is_keepable(&self) -> bool {
        self.forms().all(|form| form.object.is_keepable())
    }

    /// Whether all of its files are still what they were.
    pub fn is_current(&self) -> bool {
        self.forms().all(|form| form.object.is_current())
    }

    /// Open descriptors.
    pub fn descriptors(&self) -> usize {
        1 + self.coded.len()
    }

    fn forms(&self) -> impl Iterator<Item = &Arc<Representation>> {
        std::iter::once(&self.plain).chain(self.coded.iter().map(|(_, form)| form))
    }
}
