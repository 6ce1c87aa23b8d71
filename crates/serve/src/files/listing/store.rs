//! Rendered listings: shared by the clients that ask for the same one, and limited in memory.
//!
//! A client that does not read its listing keeps it in memory. Without sharing, a request of 40
//! bytes would take more than a megabyte.

use super::{Listing, PageRequest};
use haul_fs::Root;
use lru::LruCache;
use std::fs::{File, Metadata};
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The memory of all listings, in bytes: some 40 of the largest.
const BYTES_MAX: usize = 64 << 20;
/// The time for which a listing is shared. Sizes and times of its files may change during this
/// time.
const SHARED_TIME: Duration = Duration::from_secs(1);
/// A directory that changed less than this ago may change again without another time of change: the
/// kernel's clock for files ticks every 1 to 10 ms.
const CLOCK_TICK: Duration = Duration::from_millis(20);
/// The number of listings that are kept to be shared.
const SHARED_MAX: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// A listing as a response body.
#[derive(Debug, Clone)]
pub struct RenderedListing {
    /// Whether it is JSON; otherwise HTML.
    pub is_json: bool,
    /// The query of the next page.
    pub next_query: Option<Arc<str>>,
    /// The content.
    pub content: Arc<ListingContent>,
}

/// The bytes of a listing. They count as memory of listings until the last client has them.
#[derive(Debug)]
pub struct ListingContent {
    bytes: Box<[u8]>,
    used_bytes: Arc<AtomicUsize>,
}

/// The listings of a service.
#[derive(Debug)]
pub(crate) struct ListingStore {
    shared: Mutex<LruCache<Key, (Instant, RenderedListing)>>,
    used_bytes: Arc<AtomicUsize>,
}

/// What a listing is of. A change of the directory is another key.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    path: Vec<u8>,
    page: PageRequest,
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl ListingContent {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for ListingContent {
    fn drop(&mut self) {
        self.used_bytes.fetch_sub(self.bytes.len(), Relaxed);
    }
}

impl Default for ListingStore {
    fn default() -> Self {
        Self { shared: Mutex::new(LruCache::new(SHARED_MAX)), used_bytes: Arc::default() }
    }
}

impl ListingStore {
    /// The listing of a directory; `None` if listings have all the memory that they may have.
    pub fn render(
        &self,
        root: &Root,
        directory: &File,
        path: &[u8],
        page: PageRequest,
        shows_hidden: bool,
    ) -> io::Result<Option<RenderedListing>> {
        let metadata = directory.metadata()?;
        let key = Key {
            path: path.to_vec(),
            page: page.clone(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        };
        if let Some((rendered_at, listing)) = self.lock().get(&key)
            && rendered_at.elapsed() < SHARED_TIME
        {
            return Ok(Some(listing.clone()));
        }
        if self.used_bytes.load(Relaxed) >= BYTES_MAX {
            self.drop_shared();
        }
        if self.used_bytes.load(Relaxed) >= BYTES_MAX {
            return Ok(None);
        }
        let is_json = page.is_json;
        let listing = Listing::read(root, directory, path, page, shows_hidden)?;
        let bytes: Box<[u8]> = listing.render().into();
        self.used_bytes.fetch_add(bytes.len(), Relaxed);
        let content = ListingContent { bytes, used_bytes: Arc::clone(&self.used_bytes) };
        let next_query = listing.next_query.map(Arc::from);
        let rendered = RenderedListing { is_json, next_query, content: Arc::new(content) };
        if is_settled(&metadata) {
            self.lock().put(key, (Instant::now(), rendered.clone()));
        }
        Ok(Some(rendered))
    }

    /// Drops the listings that are kept only to be shared.
    fn drop_shared(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LruCache<Key, (Instant, RenderedListing)>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the next change of the directory will have another time.
fn is_settled(metadata: &Metadata) -> bool {
    let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    modified.elapsed().is_ok_and(|age| age >= CLOCK_TICK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_fs::Symlinks;
    use haul_http::target::Target;
    use std::fs;

    #[test]
    fn clients_share_a_listing_until_its_directory_changes() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "").unwrap();
        std::thread::sleep(CLOCK_TICK);
        let store = ListingStore::default();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        let render = |query: &str| {
            let target = Target::parse(query).unwrap();
            let page = PageRequest::parse(&target, false);
            let directory = File::open(folder.path()).unwrap();
            store.render(&root, &directory, b"", page, false).unwrap().unwrap()
        };
        let (one, other) = (render("/"), render("/"));
        assert!(Arc::ptr_eq(&one.content, &other.content));
        assert!(!Arc::ptr_eq(&one.content, &render("/?order=desc").content));
        fs::write(folder.path().join("new file"), "").unwrap();
        let text = String::from_utf8(render("/").content.bytes().to_vec()).unwrap();
        assert!(text.contains("new file"), "{text}");
    }

    #[test]
    fn listings_that_nobody_reads_have_a_bound() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "").unwrap();
        let store = ListingStore::default();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let render = |limit: usize| {
            let target = format!("/?limit={limit}");
            let page = PageRequest::parse(&Target::parse(&target).unwrap(), false);
            store.render(&root, &directory, b"", page, false).unwrap()
        };
        let held = render(1).unwrap();
        // The rest is in use by other clients.
        let of_others = BYTES_MAX - held.content.bytes().len();
        store.used_bytes.fetch_add(of_others, Relaxed);
        assert!(render(2).is_none());
        store.used_bytes.fetch_sub(of_others, Relaxed);
        assert!(render(2).is_some());
        drop(held);
        store.drop_shared();
        assert_eq!(store.used_bytes.load(Relaxed), 0);
    }
}
