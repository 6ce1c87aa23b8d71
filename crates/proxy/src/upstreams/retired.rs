//! Upstreams that left their groups, or that only another process had, as long as they have
//! connections. The connections count for the limit of an upstream that comes back.

use crate::upstreams::upstream::Upstream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The retired upstreams of all groups. All routing tables share them.
#[derive(Debug, Default)]
pub struct RetiredUpstreams(Mutex<Vec<Weak<Upstream>>>);

impl RetiredUpstreams {
    /// All retired upstreams.
    pub fn all(&self) -> Vec<Arc<Upstream>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The retired upstreams of a group.
    pub fn of_group(&self, group: &str) -> Vec<Arc<Upstream>> {
        let retired = self.lock();
        let alive = retired.iter().filter_map(Weak::upgrade);
        alive.filter(|upstream| upstream.group() == group).collect()
    }

    /// Adds an upstream that leaves its group.
    pub fn add(&self, upstream: &Arc<Upstream>) {
        Self::add_locked(&mut self.lock(), upstream);
    }

    /// The upstream with this group and name. If it is missing, `create` creates the upstream,
    /// which is added.
    pub fn find_or_add(
        &self,
        group: &str,
        name: &str,
        create: impl FnOnce() -> Option<Arc<Upstream>>,
    ) -> Option<Arc<Upstream>> {
        // The lock is held for both steps, because two event loops may ask at the same time.
        let mut retired = self.lock();
        let mut alive = retired.iter().filter_map(Weak::upgrade);
        let known = alive.find(|one| one.group() == group && one.name() == name);
        known.or_else(|| {
            let upstream = create()?;
            Self::add_locked(&mut retired, &upstream);
            Some(upstream)
        })
    }

    fn add_locked(retired: &mut Vec<Weak<Upstream>>, upstream: &Arc<Upstream>) {
        retired.retain(|one| one.strong_count() > 0 && one.as_ptr() != Arc::as_ptr(upstream));
        retired.push(Arc::downgrade(upstream));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Upstream>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream(group: &str) -> Arc<Upstream> {
        Arc::new(Upstream::new(group, "127.0.0.1:9".parse().unwrap()))
    }

    #[test]
    fn each_upstream_is_kept_once_and_while_it_is_used() {
        let retired = RetiredUpstreams::default();
        let one = upstream("web");
        retired.add(&one);
        retired.add(&one);
        let create = || panic!("it is known");
        let found = retired.find_or_add("web", "127.0.0.1:9", create).unwrap();
        assert!(Arc::ptr_eq(&found, &one) && retired.all().len() == 1);
        let other = retired.find_or_add("mail", "127.0.0.1:9", || Some(upstream("mail"))).unwrap();
        assert!(!Arc::ptr_eq(&other, &one) && retired.of_group("mail").len() == 1);
        drop((one, found, other));
        assert!(retired.all().is_empty());
    }
}
