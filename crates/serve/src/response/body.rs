//! What follows a head: pieces of memory and of files, in order.

use crate::files::resource::Representation;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The body of a response.
#[derive(Debug, Default)]
pub struct Body {
    first: Option<Piece>,
    rest: VecDeque<Piece>,
}

/// Part of a body; the range is what is left to send.
#[derive(Debug)]
pub enum Piece {
    /// Memory that was made for this response, or that every response of the kind shares.
    Bytes(Arc<[u8]>, Range<usize>),
    /// Of a small file's content.
    Content(Arc<Representation>, Range<usize>),
    /// Of a file.
    File(Arc<Representation>, Range<u64>),
}

impl Body {
    /// No body.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Memory.
    pub fn bytes(bytes: Arc<[u8]>) -> Self {
        let len = bytes.len();
        Self::of(Piece::Bytes(bytes, 0..len))
    }

    /// A part of a file.
    pub fn file(form: &Arc<Representation>, range: Range<u64>) -> Self {
        Self::of(Piece::of_file(form, range))
    }

    /// Several pieces.
    pub fn pieces(pieces: impl IntoIterator<Item = Piece>) -> Self {
        let mut rest: VecDeque<_> = pieces.into_iter().filter(|piece| piece.len() > 0).collect();
        Self { first: rest.pop_front(), rest }
    }

    fn of(piece: Piece) -> Self {
        Self { first: Some(piece).filter(|piece| piece.len() > 0), rest: VecDeque::new() }
    }

    /// How long it is, in bytes.
    pub fn len(&self) -> u64 {
        self.first.iter().chain(&self.rest).map(Piece::len).sum()
    }

    /// What comes next.
    pub fn next(&self) -> Option<&Piece> {
        self.first.as_ref()
    }

    /// Whether nothing comes after the next piece.
    pub fn is_last(&self) -> bool {
        self.rest.is_empty()
    }

    /// Takes note of bytes of the next piece that went.
    pub fn sent(&mut self, bytes: u64) {
        if let Some(piece) = &mut self.first {
            match piece {
                Piece::Bytes(_, range) | Piece::Content(_, range) => range.start += bytes as usize,
                Piece::File(_, range) => range.start += bytes,
            }
            if piece.len() == 0 {
                self.first = self.rest.pop_front();
            }
        }
    }
}

impl Piece {
    /// A part of a file, from memory where it is there.
    pub fn of_file(form: &Arc<Representation>, range: Range<u64>) -> Self {
        match form.object.content() {
            Some(_) => Self::Content(Arc::clone(form), range.start as usize..range.end as usize),
            None => Self::File(Arc::clone(form), range),
        }
    }

    /// Memory that was made for this response.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self::Bytes(bytes.into(), 0..len)
    }

    /// What is left of it, in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(_, range) | Self::Content(_, range) => range.len() as u64,
            Self::File(_, range) => range.end - range.start,
        }
    }

    /// What is left of it, where it is in memory.
    pub fn memory(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes, range) => bytes.get(range.clone()),
            Self::Content(form, range) => form.object.content()?.get(range.clone()),
            Self::File(..) => None,
        }
    }
}
