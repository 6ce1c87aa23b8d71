//! A cache of open files, and of the content of small ones, for one event loop.
//!
//! A cached file is validated before it is sent, by one `fstat` of its change time (`ctime`). So
//! every request that a client sends after a write, replacement, rename or deletion gets the new
//! state. If a directory or symbolic link above the file was moved, this is detected within a
//! second, when the whole path is looked up again.

use crate::files::resource::Resource;
use lru::LruCache;
use std::sync::Arc;

/// The time for which the lookup of a path is valid, in seconds.
const LOOKUP_SECONDS_MAX: u32 = 1;

/// The time for which an unused file is kept, in seconds.
const UNUSED_SECONDS_MAX: u32 = 60;

/// A cache of open files by target. The least recently used file is evicted first.
#[derive(Debug)]
pub struct FileCache {
    entries: LruCache<Box<str>, Entry>,
    descriptors_max: usize,
    bytes_max: usize,
    descriptors: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    resource: Arc<Resource>,
    /// The second of the clock in which the path was looked up.
    looked_up_at: u32,
    /// The second of the clock in which the entry was last used.
    used_at: u32,
    /// The epoch in which the files were last found unchanged.
    validated_in: Option<ValidationEpoch>,
    bytes: usize,
}

/// A validation epoch: the time between two receives. One `fstat` in it is valid for all requests
/// that were received before.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ValidationEpoch(u64);

impl ValidationEpoch {
    /// Ends the epoch: something was received, from a client or from an offload thread.
    pub fn advance(&mut self) {
        self.0 += 1;
    }
}

impl FileCache {
    /// A cache of at most this many descriptors and this much memory, in bytes.
    pub fn new(descriptors_max: usize, bytes_max: usize) -> Self {
        Self {
            entries: LruCache::unbounded(),
            descriptors_max,
            bytes_max,
            descriptors: 0,
            bytes: 0,
        }
    }

    /// The resource of a target, if it is cached and unchanged. `seconds` is the time by the event
    /// loop's clock.
    pub fn get(
        &mut self,
        target: &str,
        seconds: u32,
        epoch: ValidationEpoch,
    ) -> Option<Arc<Resource>> {
        let entry = self.entries.get_mut(target)?;
        entry.used_at = seconds;
        if seconds.saturating_sub(entry.looked_up_at) >= LOOKUP_SECONDS_MAX {
            return None;
        }
        if entry.validated_in != Some(epoch) {
            entry.validated_in = entry.resource.is_current().then_some(epoch);
        }
        entry.validated_in.map(|_| Arc::clone(&entry.resource))
    }

    /// Caches the resource of a target instead of a former one, if it may be cached and fits.
    pub fn put(&mut self, target: &str, resource: &Arc<Resource>, seconds: u32) {
        self.remove(target);
        let bytes = resource.memory_bytes() + target.len();
        if !resource.is_cacheable()
            || bytes > self.bytes_max
            || resource.descriptors() > self.descriptors_max
        {
            return;
        }
        self.descriptors += resource.descriptors();
        self.bytes += bytes;
        self.entries.put(
            target.into(),
            Entry {
                resource: Arc::clone(resource),
                looked_up_at: seconds,
                used_at: seconds,
                validated_in: None,
                bytes,
            },
        );
        while self.descriptors > self.descriptors_max || self.bytes > self.bytes_max {
            let Some((_, oldest)) = self.entries.pop_lru() else { break };
            self.release(&oldest);
        }
    }

    /// Removes the resource of a target.
    pub fn remove(&mut self, target: &str) {
        if let Some(entry) = self.entries.pop(target) {
            self.release(&entry);
        }
    }

    /// Removes resources that were not used for a while: a deleted file occupies disk space as long
    /// as it is open.
    pub fn expire(&mut self, seconds: u32) {
        while self
            .entries
            .peek_lru()
            .is_some_and(|(_, entry)| seconds.saturating_sub(entry.used_at) > UNUSED_SECONDS_MAX)
        {
            if let Some((_, entry)) = self.entries.pop_lru() {
                self.release(&entry);
            }
        }
    }

    /// Removes all resources, because the process is short of descriptors.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.descriptors = 0;
        self.bytes = 0;
    }

    /// Subtracts an entry that was removed from the totals.
    fn release(&mut self, entry: &Entry) {
        self.descriptors -= entry.resource.descriptors();
        self.bytes -= entry.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::files::service::{LookupResult, Service};
    use haul_fs::Blocking;
    use haul_http::target::Target;
    use std::fs;
    use std::time::Duration;

    fn find(service: &Service, target: &str) -> Arc<Resource> {
        match service.find(&Target::parse(target).unwrap(), Blocking::Disk).unwrap() {
            LookupResult::Resource(resource) => resource,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_cache_stays_within_its_limits_and_evicts_the_least_recently_used() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::write(folder.path().join(name), name.repeat(1000)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(2100));
        let service = Service::new(&Config::new(folder.path())).unwrap();
        let mut epoch = ValidationEpoch::default();
        for mut cache in [FileCache::new(2, 1 << 20), FileCache::new(100, 2 * (1000 + 1000))] {
            for name in ["/a", "/b", "/a", "/c"] {
                if cache.get(name, 0, epoch).is_none() {
                    cache.put(name, &find(&service, name), 0);
                }
            }
            assert!(cache.get("/a", 0, epoch).is_some() && cache.get("/c", 0, epoch).is_some());
            assert!(cache.get("/b", 0, epoch).is_none(), "it was the least recently used");
            assert!(cache.get("/a", LOOKUP_SECONDS_MAX, epoch).is_none(), "its lookup expired");
            cache.expire(UNUSED_SECONDS_MAX);
            assert!(cache.get("/c", 0, epoch).is_some(), "it was used recently");
            fs::write(folder.path().join("c"), "new").unwrap();
            epoch.advance();
            assert!(cache.get("/c", 0, epoch).is_none(), "it has changed");
            cache.remove("/c");
            cache.expire(2 * UNUSED_SECONDS_MAX + 2);
            assert_eq!((cache.descriptors, cache.bytes), (0, 0));
            fs::write(folder.path().join("c"), "c".repeat(1000)).unwrap();
            std::thread::sleep(Duration::from_millis(2100));
        }
    }

    #[test]
    fn one_validation_serves_all_requests_of_its_epoch_and_no_later_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "old").unwrap();
        std::thread::sleep(Duration::from_millis(2100));
        let service = Service::new(&Config::new(folder.path())).unwrap();
        let mut cache = FileCache::new(1, 10_000);
        let mut epoch = ValidationEpoch::default();
        let old = find(&service, "/a");
        fs::write(folder.path().join("a"), "new").unwrap();
        cache.put("/a", &old, 0);
        assert!(cache.get("/a", 0, epoch).is_none(), "it has changed since the lookup");
        std::thread::sleep(Duration::from_millis(2100));
        cache.put("/a", &find(&service, "/a"), 0);
        assert!(cache.get("/a", 0, epoch).is_some());
        fs::remove_file(folder.path().join("a")).unwrap();
        assert!(cache.get("/a", 0, epoch).is_some(), "it was validated in the same epoch");
        epoch.advance();
        assert!(cache.get("/a", 0, epoch).is_none());
        assert!(
            cache.get("/a", 0, epoch).is_none(),
            "a file that was found changed stays invalid later"
        );
    }
}
