//! The folders that lead to sources which keep their paths (`--relative`).

use crate::source::found::{ListedFolder, OpenFolder};
use std::sync::Arc;

/// The folders that lead from the base of a source to the source, each listed. The next source
/// shares the first of these folders if the sources are sorted.
#[derive(Debug, Default)]
pub struct ImpliedFolders {
    /// The base, with its path.
    base: Option<(Vec<u8>, Arc<OpenFolder>)>,
    folders: Vec<ListedFolder>,
}

impl ImpliedFolders {
    /// Leaves the folders that do not lead to a source with this base and these names. Returns
    /// the numbers of these folders, each before its parent.
    pub fn leave_others(&mut self, base: &[u8], names: &[Vec<u8>]) -> Vec<u64> {
        let is_same_base = self.base.as_ref().is_some_and(|(path, _)| path == base);
        let pairs = self.folders.iter().zip(names);
        let shared = pairs.take_while(|(folder, name)| folder.name == **name).count();
        if !is_same_base {
            self.base = None;
        }
        self.leave(if is_same_base { shared } else { 0 })
    }

    /// Leaves all folders. Returns the numbers of the folders, each before its parent.
    pub fn leave_all(&mut self) -> Vec<u64> {
        self.leave(0)
    }

    fn leave(&mut self, kept: usize) -> Vec<u64> {
        self.folders.drain(kept..).rev().map(|folder| folder.id).collect()
    }

    /// The folders so far.
    pub fn depth(&self) -> usize {
        self.folders.len()
    }

    /// The innermost folder, with its number; the base has the number 0. `None` without a base.
    pub fn innermost(&self) -> Option<(u64, Arc<OpenFolder>)> {
        let (_, base) = self.base.as_ref()?;
        let innermost = self.folders.last();
        Some(innermost.map_or((0, Arc::clone(base)), |one| (one.id, Arc::clone(&one.open))))
    }

    /// Sets the base, from which all folders are left.
    pub fn set_base(&mut self, path: &[u8], open: Arc<OpenFolder>) {
        self.base = Some((path.to_vec(), open));
    }

    /// Adds the next folder.
    pub fn push(&mut self, folder: ListedFolder) {
        self.folders.push(folder);
    }
}
