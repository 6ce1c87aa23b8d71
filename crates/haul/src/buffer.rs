//! [`Buffer`], memory that can be lent.

use crate::error::Error;
use crate::pool::PooledBuffer;
use std::any::Any;
use std::fmt;
use std::ops::{Bound, Deref, RangeBounds};
use std::sync::Arc;

/// Memory that can be lent: a range of bytes, and their owner, which keeps them unchanged during
/// the loan.
///
/// The kernel does not require alignment, but a loan is cheapest if its bytes fill whole pages, as
/// the buffers of a [`crate::BufferPool`] do.
///
/// ```
/// use haul::Buffer;
/// use std::sync::Arc;
/// let cached: Arc<[u8]> = Arc::from(&b"one copy for many peers"[..]);
/// let part = Buffer::from(Arc::clone(&cached)).slice(4..8).unwrap();
/// assert_eq!(&*part, b"copy");
/// ```
pub struct Buffer {
    owner: Owner,
    start: usize,
    len: usize,
}

/// The owner of a buffer's bytes.
enum Owner {
    Pooled(PooledBuffer),
    Vec(Vec<u8>),
    Shared(Arc<[u8]>),
    Static(&'static [u8]),
    /// Boxed, so that it stays where it is when the buffer is moved.
    Foreign {
        owner: Box<dyn Any + Send + Sync>,
        bytes: fn(&(dyn Any + Send + Sync)) -> &[u8],
    },
}

impl Owner {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Pooled(buffer) => buffer,
            Self::Vec(bytes) => bytes,
            Self::Shared(bytes) => bytes,
            Self::Static(bytes) => bytes,
            Self::Foreign { owner, bytes } => bytes(&**owner),
        }
    }
}

impl Buffer {
    /// Takes memory of any owner, such as a mapped file or `bytes::Bytes`. [`Buffer::into_owner`]
    /// gives it back after the loan.
    ///
    /// The owner must return the same bytes at the same address from each `as_ref` until it is
    /// dropped, as every owner without interior mutability does. From another owner, the peer may
    /// receive other bytes, even bytes of other memory, or the send fails. A mapped file that a
    /// program changes during the loan is sent with the changes; if it is truncated, the send
    /// fails.
    pub fn owned<T: AsRef<[u8]> + Send + Sync + 'static>(owner: T) -> Self {
        Self::of(Owner::Foreign {
            owner: Box::new(owner),
            bytes: |owner| owner.downcast_ref::<T>().map_or(&[], AsRef::as_ref),
        })
    }

    /// Takes one reference to memory that others use too, such as an `Arc<Vec<u8>>` or a mapped
    /// file that is sent to many peers. (For `Arc<[u8]>`, use `Buffer::from`.) The rule of
    /// [`Buffer::owned`] applies, and [`Buffer::into_owner`] gives the `Arc` back.
    ///
    /// ```
    /// let page = std::sync::Arc::new(vec![7; 8192]);
    /// let buffer = haul::Buffer::shared(page.clone()).slice(..4096).unwrap();
    /// assert_eq!(buffer.as_ptr(), page.as_ptr());
    /// ```
    pub fn shared<T: AsRef<[u8]> + Send + Sync + 'static>(owner: Arc<T>) -> Self {
        Self::of(Owner::Foreign {
            owner: Box::new(owner),
            bytes: |owner| owner.downcast_ref::<Arc<T>>().map_or(&[], |owner| (**owner).as_ref()),
        })
    }

    /// The number of bytes when the buffer was made.
    pub(crate) fn original_len(&self) -> usize {
        self.len
    }

    fn of(owner: Owner) -> Self {
        let len = owner.bytes().len();
        Self { owner, start: 0, len }
    }

    /// Keeps only a range of the bytes. [`Error::InvalidInput`] if it is not inside the buffer,
    /// which is then dropped.
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self, Error> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len => {
                Ok(Self { start: self.start + start, len: end - start, ..self })
            }
            _ => Err(Error::InvalidInput(
                "the range is not inside the buffer, or ends before it begins",
            )),
        }
    }

    /// Returns the owner of the bytes if it is a `T`, else the buffer unchanged. `T` is the type
    /// that the buffer was made from, such as `PooledBuffer`, `Vec<u8>`, `String` or what
    /// [`Buffer::owned`] took; `Arc<T>` for [`Buffer::shared`], and `&'static [u8]` for everything
    /// static. A sub-range returns all of its owner.
    pub fn into_owner<T: 'static>(self) -> Result<T, Self> {
        let Self { owner, start, len } = self;
        let owner = match owner {
            Owner::Pooled(buffer) => downcast(buffer).map_err(Owner::Pooled),
            Owner::Vec(bytes) => downcast(bytes).map_err(Owner::Vec),
            Owner::Shared(bytes) => downcast(bytes).map_err(Owner::Shared),
            Owner::Static(bytes) => downcast(bytes).map_err(Owner::Static),
            Owner::Foreign { owner, bytes } => match owner.downcast::<T>() {
                Ok(owner) => Ok(*owner),
                Err(owner) => Err(Owner::Foreign { owner, bytes }),
            },
        };
        owner.map_err(|owner| Self { owner, start, len })
    }
}

/// Returns `value` as a `T` if it is one, else unchanged.
fn downcast<T: 'static, V: 'static>(value: V) -> Result<T, V> {
    let mut value = Some(value);
    let same: Option<&mut Option<T>> = (&mut value as &mut dyn Any).downcast_mut();
    match (same.and_then(Option::take), value) {
        (None, Some(value)) => Err(value),
        (Some(same), _) => Ok(same),
        (None, None) => unreachable!("only a value of the type is taken"),
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // Empty if the owner breaks the rule of `owned` and shrinks.
        self.owner.bytes().get(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl fmt::Debug for Buffer {
    /// Prints the kind and the length, never the content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.owner {
            Owner::Pooled(_) => "Pooled",
            Owner::Vec(_) => "Vec",
            Owner::Shared(_) => "Shared",
            Owner::Static(_) => "Static",
            Owner::Foreign { .. } => "Owned",
        };
        write!(formatter, "{kind}({} bytes)", self.len())
    }
}

impl From<Box<[u8]>> for Buffer {
    fn from(bytes: Box<[u8]>) -> Self {
        Self::owned(bytes)
    }
}

impl From<String> for Buffer {
    fn from(text: String) -> Self {
        Self::owned(text)
    }
}

impl From<&'static str> for Buffer {
    fn from(text: &'static str) -> Self {
        Self::from(text.as_bytes())
    }
}

impl<const N: usize> From<&'static [u8; N]> for Buffer {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self::of(Owner::Static(bytes))
    }
}

impl From<PooledBuffer> for Buffer {
    fn from(buffer: PooledBuffer) -> Self {
        Self::of(Owner::Pooled(buffer))
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::of(Owner::Vec(bytes))
    }
}

impl From<Arc<[u8]>> for Buffer {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::of(Owner::Shared(bytes))
    }
}

impl From<&'static [u8]> for Buffer {
    fn from(bytes: &'static [u8]) -> Self {
        Self::of(Owner::Static(bytes))
    }
}

#[cfg(feature = "bytes")]
impl From<bytes::Bytes> for Buffer {
    /// [`Buffer::into_owner`] gives it back.
    fn from(bytes: bytes::Bytes) -> Self {
        Self::owned(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::BufferPool;

    #[test]
    fn a_buffer_converts_back_to_its_kind_and_debug_omits_its_content() {
        let mut pooled = BufferPool::new(10, 1).unwrap().take().unwrap();
        pooled.extend_from_slice(b"0123456789").unwrap();
        let pooled = Buffer::from(pooled);
        assert_eq!(format!("{pooled:?}"), "Pooled(10 bytes)");
        assert_eq!(pooled.into_owner::<PooledBuffer>().unwrap().len(), 10);
        let text = Buffer::from("secret".to_owned()).into_owner::<String>().unwrap();
        assert_eq!(text, "secret");
        assert_eq!(Buffer::from(vec![1]).into_owner::<Vec<u8>>().unwrap(), [1]);
        assert_eq!(Buffer::from("static").into_owner::<&[u8]>().unwrap(), b"static");
        let other = Buffer::from(b"static").into_owner::<Vec<u8>>().unwrap_err();
        assert_eq!(format!("{other:?}"), "Static(6 bytes)");
    }

    #[test]
    fn a_slice_of_a_slice_is_counted_from_the_first() {
        let shared: Arc<[u8]> = Arc::from(&b"0123456789"[..]);
        let part = Buffer::from(Arc::clone(&shared)).slice(2..=7).unwrap();
        assert_eq!(&*part, b"234567");
        let part = part.slice(1..).unwrap().slice(..2).unwrap();
        assert_eq!(&*part, b"34");
        assert_eq!(&*part.into_owner::<Arc<[u8]>>().unwrap(), &*shared, "all of it comes back");
        let whole = || Buffer::from(b"0123");
        assert!(whole().slice(4..).unwrap().is_empty());
        for (start, end) in [(0, 5), (5, 5), (3, 2), (usize::MAX, usize::MAX)] {
            assert!(matches!(whole().slice(start..end), Err(Error::InvalidInput(_))), "{start}");
        }
        let bounds = (Bound::Excluded(usize::MAX), Bound::Included(usize::MAX));
        assert!(whole().slice(bounds).is_err());
    }

    #[test]
    fn an_owner_of_another_crate_comes_back_as_it_was() {
        let inline = Buffer::owned(*b"on the stack before").slice(3..6).unwrap();
        assert_eq!(&*inline, b"the");
        let inline = inline.into_owner::<String>().unwrap_err();
        assert_eq!(&*inline, b"the", "another type is not it");
        assert_eq!(inline.into_owner::<[u8; 19]>().unwrap(), *b"on the stack before");
        let shared = Arc::new(String::from("of many"));
        let part = Buffer::shared(Arc::clone(&shared)).slice(3..).unwrap();
        assert_eq!(&*part, b"many");
        assert!(Arc::ptr_eq(&part.into_owner::<Arc<String>>().unwrap(), &shared));
    }

    #[cfg(feature = "bytes")]
    #[test]
    fn bytes_are_lent_without_a_copy_of_theirs() {
        let bytes = bytes::Bytes::from(vec![7; 100]);
        let buffer = Buffer::from(bytes.slice(10..20));
        assert_eq!(buffer.as_ptr(), bytes[10..].as_ptr());
        assert_eq!(buffer.into_owner::<bytes::Bytes>().unwrap(), bytes.slice(10..20));
    }
}
