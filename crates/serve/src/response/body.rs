//! Response bodies: pieces of memory and of files, in order.

use crate::files::listing::ListingContent;
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

/// A part of a body. The range is its unsent rest.
#[derive(Debug)]
pub enum Piece {
    /// Memory of this response, or memory that all responses of a kind share.
    Bytes(Arc<[u8]>, Range<usize>),
    /// A part of a listing, which clients may share.
    Listing(Arc<ListingContent>, Range<usize>),
    /// A part of a small file, from its content in memory.
    Content(Arc<Representation>, Range<usize>),
    /// A part of a file.
    File(Arc<Representation>, Range<u64>),
}

impl Body {
    /// An empty body.
    pub fn empty() -> Self {
        Self::default()
    }

    /// A body in memory.
    pub fn bytes(bytes: Arc<[u8]>) -> Self {
        let len = bytes.len();
        Self::of(Piece::Bytes(bytes, 0..len))
    }

    /// A listing.
    pub fn listing(content: &Arc<ListingContent>) -> Self {
        Self::of(Piece::Listing(Arc::clone(content), 0..content.bytes().len()))
    }

    /// A body that is a part of a file.
    pub fn file(representation: &Arc<Representation>, range: Range<u64>) -> Self {
        Self::of(Piece::of_file(representation, range))
    }

    /// A body of several pieces. Empty ones are left out.
    pub fn pieces(pieces: impl IntoIterator<Item = Piece>) -> Self {
        let mut rest: VecDeque<_> = pieces.into_iter().filter(|piece| piece.len() > 0).collect();
        Self { first: rest.pop_front(), rest }
    }

    fn of(piece: Piece) -> Self {
        Self { first: Some(piece).filter(|piece| piece.len() > 0), rest: VecDeque::new() }
    }

    /// The number of unsent bytes.
    pub fn len(&self) -> u64 {
        self.first.iter().chain(&self.rest).map(Piece::len).sum()
    }

    /// The piece to send next.
    pub fn next(&self) -> Option<&Piece> {
        self.first.as_ref()
    }

    /// Whether the next piece is the last one.
    pub fn is_last(&self) -> bool {
        self.rest.is_empty()
    }

    /// Records that `bytes` of the next piece were sent.
    pub fn sent(&mut self, bytes: u64) {
        if let Some(piece) = &mut self.first {
            match piece {
                Piece::Bytes(_, range) | Piece::Listing(_, range) | Piece::Content(_, range) => {
                    range.start += bytes as usize;
                }
                Piece::File(_, range) => range.start += bytes,
            }
            if piece.len() == 0 {
                self.first = self.rest.pop_front();
            }
        }
    }
}

impl Piece {
    /// A part of a file, from memory if the file is small.
    pub fn of_file(representation: &Arc<Representation>, range: Range<u64>) -> Self {
        match representation.object.content() {
            Some(_) => {
                Self::Content(Arc::clone(representation), range.start as usize..range.end as usize)
            }
            None => Self::File(Arc::clone(representation), range),
        }
    }

    /// A piece of bytes that were made for this response.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self::Bytes(bytes.into(), 0..len)
    }

    /// The number of unsent bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(_, range) | Self::Listing(_, range) | Self::Content(_, range) => {
                range.len() as u64
            }
            Self::File(_, range) => range.end - range.start,
        }
    }

    /// The unsent bytes, if they are in memory.
    pub fn memory(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes, range) => bytes.get(range.clone()),
            Self::Listing(content, range) => content.bytes().get(range.clone()),
            Self::Content(representation, range) => {
                representation.object.content()?.get(range.clone())
            }
            Self::File(..) => None,
        }
    }
}
