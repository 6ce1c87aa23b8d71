//! Upstreams that have left their groups, or that only another process had, as long as they have
//! connections: these count for the limit of one that comes back.

use crate::upstream::Upstream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The retired upstreams, by the names of their groups. All routing tables share them.
#[derive(Debug, Default)]
pub struct RetiredUpstreams(Mutex<Vec<(String, Weak<Upstream>)>>);

impl RetiredUpstreams {
    /// All of them, with the names of their groups.
    pub fn all(&self) -> Vec<(String, Arc<Upstream>)> {
        let retired = self.lock();
        let alive = retired.iter().filter_map(|(group, one)| Some((group.clone(), one.upgrade()?)));
        alive.collect()
    }

    /// Those of a group.
    pub fn of_group(&self, group: &str) -> Vec<Arc<Upstream>> {
        let retired = self.lock();
        let of_group = retired.iter().filter(|(name, _)| name == group);
        of_group.filter_map(|(_, upstream)| upstream.upgrade()).collect()
    }

    /// The name of the group of an upstream.
    pub fn group_of(&self, upstream: &Arc<Upstream>) -> Option<String> {
        let retired = self.lock();
        let mut of_upstream =
            retired.iter().filter(|(_, one)| one.as_ptr() == Arc::as_ptr(upstream));
        of_upstream.next().map(|(group, _)| group.clone())
    }

    /// Adds an upstream that leaves its group.
    pub fn add(&self, group: &str, upstream: &Arc<Upstream>) {
        Self::add_locked(&mut self.lock(), group, upstream);
    }

    /// The upstream of a name. If there is none, `create` is called, and its upstream is added.
    pub fn find_or_add(
        &self,
        group: &str,
        name: &str,
        create: impl FnOnce() -> Option<Arc<Upstream>>,
    ) -> Option<Arc<Upstream>> {
        // One lock for both: two event loops may ask at the same time.
        let mut retired = self.lock();
        let mut of_group = retired.iter().filter(|(one, _)| one == group);
        let known = of_group.find_map(|(_, one)| one.upgrade().filter(|one| one.name() == name));
        known.or_else(|| {
            let upstream = create()?;
            Self::add_locked(&mut retired, group, &upstream);
            Some(upstream)
        })
    }

    fn add_locked(
        retired: &mut Vec<(String, Weak<Upstream>)>,
        group: &str,
        upstream: &Arc<Upstream>,
    ) {
        retired.retain(|(_, one)| one.strong_count() > 0 && one.as_ptr() != Arc::as_ptr(upstream));
        retired.push((group.to_owned(), Arc::downgrade(upstream)));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(String, Weak<Upstream>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream() -> Arc<Upstream> {
        Arc::new(Upstream::new("127.0.0.1:9".parse().unwrap()))
    }

    #[test]
    fn each_upstream_is_kept_once_and_while_it_is_used() {
        let retired = RetiredUpstreams::default();
        let one = upstream();
        retired.add("web", &one);
        retired.add("web", &one);
        let create = || panic!("it is known");
        let found = retired.find_or_add("web", "127.0.0.1:9", create).unwrap();
        assert!(Arc::ptr_eq(&found, &one) && retired.all().len() == 1);
        let other = retired.find_or_add("mail", "127.0.0.1:9", || Some(upstream())).unwrap();
        assert!(!Arc::ptr_eq(&other, &one) && retired.of_group("mail").len() == 1);
        assert_eq!(retired.group_of(&other).as_deref(), Some("mail"));
        drop((one, found, other));
        assert!(retired.all().is_empty());
    }
}
