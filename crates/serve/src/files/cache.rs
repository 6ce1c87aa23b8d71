//! Files that are kept open, and small ones in memory, for one event loop.
//!
//! What is kept is looked at before it is sent: a file that was written to, replaced, renamed or deleted is seen by every
//! request that is sent after that (its inode's change time tells, one cheap call). A folder or a symbolic link above it that was
//! moved is seen within a second, when the whole path is walked again.

use crate::files::resource::Resource;
use lru::LruCache;
use std::sync::Arc;

/// How long a path need not be walked again.
const WALKED_SECONDS: u32 = 1;

/// How long a file is kept that nobody asks for.
const KEPT_SECONDS: u32 = 60;

/// Files that are kept open.
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
    walked: u32,
    used: u32,
    /// The epoch in which it was last found unchanged.
    validated_in: Option<ValidationEpoch>,
    bytes: usize,
}

/// A time in which no client has said anything: all who have asked until then may be told what a look at a file has found out
/// in it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ValidationEpoch(u64);

impl ValidationEpoch {
    /// It is over: somebody has said something.
    pub fn advance(&mut self) {
        self.0 += 1;
    }
}

impl FileCache {
    /// A cache of so many descriptors and so much memory.
    pub fn new(descriptors_max: usize, bytes_max: usize) -> Self {
        Self {
            entries: LruCache::unbounded(),
            descriptors_max,
            bytes_max,
            descriptors: 0,
            bytes: 0,
        }
    }

    /// What stands for a target, if it is known and unchanged. `seconds` is the loop's clock.
    pub fn get(
        &mut self,
        target: &str,
        seconds: u32,
        epoch: ValidationEpoch,
    ) -> Option<Arc<Resource>> {
        let entry = self.entries.get_mut(target)?;
        entry.used = seconds;
        if seconds.saturating_sub(entry.walked) >= WALKED_SECONDS {
            return None;
        }
        if entry.validated_in != Some(epoch) {
            entry.validated_in = entry.resource.is_current().then_some(epoch);
        }
        entry.validated_in.map(|_| Arc::clone(&entry.resource))
    }

    /// Keeps what was found for a target, in the place of what was known before.
    pub fn put(&mut self, target: &str, resource: &Arc<Resource>, seconds: u32) {
        self.remove(target);
        let bytes = resource.memory_bytes() + target.len();
        if !resource.is_keepable()
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
                walked: seconds,
                used: seconds,
                validated_in: None,
                bytes,
            },
        );
        while self.descriptors > self.descriptors_max || self.bytes > self.bytes_max {
            let Some((_, oldest)) = self.entries.pop_lru() else { break };
            self.forget(&oldest);
        }
    }

    /// Lets go of what was known for a target.
    pub fn remove(&mut self, target: &str) {
        if let Some(entry) = self.entries.pop(target) {
            self.forget(&entry);
        }
    }

    /// Lets go of what nobody has asked for in a while: a deleted file keeps its space as long as it is open.
    pub fn expire(&mut self, seconds: u32) {
        while self
            .entries
            .peek_lru()
            .is_some_and(|(_, entry)| seconds.saturating_sub(entry.used) > KEPT_SECONDS)
        {
            if let Some((_, entry)) = self.entries.pop_lru() {
                self.forget(&entry);
            }
        }
    }

    /// Lets go of everything: descriptors are short.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.descriptors = 0;
        self.bytes = 0;
    }

    fn forget(&mut self, entry: &Entry) {
        self.descriptors -= entry.resource.descriptors();
        self.bytes -= entry.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::files::service::{Found, Service};
    use haul_fs::Blocking;
    use haul_http::target::Target;
    use std::fs;
    use std::time::Duration;

    fn find(service: &Service, target: &str) -> Arc<Resource> {
        match service.find(&Target::parse(target).unwrap(), false, Blocking::Disk).unwrap() {
            Found::Resource(resource) => resource,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_kept_stays_within_its_bounds_and_the_longest_unused_goes_first() {
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
            assert!(cache.get("/b", 0, epoch).is_none(), "it was used longest ago");
            assert!(cache.get("/a", WALKED_SECONDS, epoch).is_none(), "its path is walked again");
            cache.expire(KEPT_SECONDS);
            assert!(cache.get("/c", 0, epoch).is_some(), "it was used not so long ago");
            fs::write(folder.path().join("c"), "new").unwrap();
            epoch.advance();
            assert!(cache.get("/c", 0, epoch).is_none(), "it has changed");
            cache.remove("/c");
            cache.expire(2 * KEPT_SECONDS + 2);
            assert_eq!((cache.descriptors, cache.bytes), (0, 0));
            fs::write(folder.path().join("c"), "c".repeat(1000)).unwrap();
            std::thread::sleep(Duration::from_millis(2100));
        }
    }

    #[test]
    fn a_look_is_good_for_all_who_have_asked_before_it_and_for_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "old").unwrap();
        std::thread::sleep(Duration::from_millis(2100));
        let service = Service::new(&Config::new(folder.path())).unwrap();
        let mut cache = FileCache::new(1, 10_000);
        let mut epoch = ValidationEpoch::default();
        let old = find(&service, "/a");
        fs::write(folder.path().join("a"), "new").unwrap();
        cache.put("/a", &old, 0);
        assert!(cache.get("/a", 0, epoch).is_none(), "nobody has looked at it since it was found");
        std::thread::sleep(Duration::from_millis(2100));
        cache.put("/a", &find(&service, "/a"), 0);
        assert!(cache.get("/a", 0, epoch).is_some());
        fs::remove_file(folder.path().join("a")).unwrap();
        assert!(
            cache.get("/a", 0, epoch).is_some(),
            "whoever asks for it asked before it was removed"
        );
        epoch.advance();
        assert!(cache.get("/a", 0, epoch).is_none());
        assert!(
            cache.get("/a", 0, epoch).is_none(),
            "what has changed is not taken for unchanged later"
        );
    }
}
