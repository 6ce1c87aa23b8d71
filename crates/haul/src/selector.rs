//! [`MethodSelector`]: chooses the send method for files and memory, by plan or by setting, and
//! falls back where it must.

use crate::error::{Error, Refusal};
use crate::fallback::{self, COPIED_BYTES_BEFORE_FALLBACK, Fallback};
use crate::method::{AttachedMethod, Counts, SendMethod};
use crate::plan::{Condition, Plan, SourceKind, call_bytes};
use crate::settings::{MethodChoice, SendSettings};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Consecutive refusals, each of which may be the file's, after which a method is left out for
/// [`SKIPPED_SENDS`] sends.
const REFUSALS_MAX: u32 = 8;
/// The sends after which a method is tried again that was refused for many files in a row.
const SKIPPED_SENDS: u32 = 64;

/// The send methods of one socket.
pub(crate) struct MethodSelector {
    settings: Arc<SendSettings>,
    /// The methods that were used, in the order of first use. Disabled ones stay: the kernel may
    /// still hold pages that they lent.
    attached_methods: Vec<(SendMethod, Box<dyn AttachedMethod>)>,
    disabled: Vec<SendMethod>,
    fallbacks: Vec<Fallback>,
    latest: Option<SendMethod>,
    /// The methods that were refused and have not succeeded since.
    refusals: Vec<Refusals>,
}

/// The refusals of a method since it has last succeeded, each of which may be the file's.
struct Refusals {
    method: SendMethod,
    count: u32,
    /// The sends for which it is left out.
    skipped_sends: u32,
}

impl MethodSelector {
    pub fn new(settings: Arc<SendSettings>) -> Self {
        Self {
            settings,
            attached_methods: Vec::new(),
            disabled: Vec::new(),
            fallbacks: Vec::new(),
            latest: None,
            refusals: Vec::new(),
        }
    }

    /// Sends a prefix of `range`, which must not be empty; returns the bytes that the socket
    /// accepted.
    ///
    /// `other_bytes` were sent by the sender itself, but not from files.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: &Range<u64>,
        other_bytes: u64,
    ) -> Result<u64, Error> {
        for refusals in &mut self.refusals {
            refusals.skipped_sends = refusals.skipped_sends.saturating_sub(1);
        }
        let mut refused: Vec<SendMethod> = Vec::new();
        loop {
            let method = self.choose_without(&refused, source, range);
            let sent = self
                .attached_method(method, socket, other_bytes)
                .and_then(|attached| attached.send(socket, source, range.clone()));
            match sent {
                // `read+write`, which always works, has no fallback.
                Err(reason) if reason.is_refusal() && method != SendMethod::ReadWrite => {
                    refused.push(method);
                    self.record_refusal(method, &reason);
                    let to = self.choose_without(&refused, source, range).name();
                    self.record_fallback(method, to, reason.to_string());
                }
                Err(error) => return Err(error),
                Ok(sent) => {
                    self.latest = Some(method);
                    self.refusals.retain(|refusals| refusals.method != method);
                    if self.has_only_copied(method) {
                        self.disabled.push(method);
                        let to = self.choose(source, range).name();
                        let reason = "the kernel copied all bytes of zero-copy sends";
                        self.record_fallback(method, to, reason.into());
                    }
                    return Ok(sent);
                }
            }
        }
    }

    /// Chooses the method for `range` of `source`.
    pub fn choose(&self, source: Source<'_>, range: &Range<u64>) -> SendMethod {
        self.choose_without(&[], source, range)
    }

    /// Chooses the method for `range` of `source`, but none that was refused in this call.
    fn choose_without(
        &self,
        refused: &[SendMethod],
        source: Source<'_>,
        range: &Range<u64>,
    ) -> SendMethod {
        let is_skipped = |method| {
            self.refusals.iter().any(|other| other.method == method && other.skipped_sends > 0)
        };
        let is_allowed = |method: SendMethod| {
            !self.disabled.contains(&method) && !refused.contains(&method) && !is_skipped(method)
        };
        let by_plan = |plan: &Plan| {
            let source =
                if source.as_memory().is_some() { SourceKind::Memory } else { SourceKind::File };
            let condition = Condition { source, offloads: true };
            plan.choose(condition, range.end - range.start, is_allowed)
                .unwrap_or(SendMethod::ReadWrite)
        };
        match &self.settings.choice {
            MethodChoice::Builtin => by_plan(Plan::builtin()),
            MethodChoice::Plan(plan) => by_plan(plan),
            MethodChoice::Method(first) => {
                std::iter::successors(Some(*first), |method| method.fallback())
                    .find(|&method| is_allowed(method))
                    .unwrap_or(SendMethod::ReadWrite)
            }
        }
    }

    /// Disables `MSG_ZEROCOPY` for files, because its completions belong to the sender's loans.
    pub fn disable_zerocopy(&mut self) {
        if self.disabled.contains(&SendMethod::Zerocopy) {
            return;
        }
        self.disabled.push(SendMethod::Zerocopy);
        if self.settings.choice == MethodChoice::Method(SendMethod::Zerocopy) {
            let reason = "the socket's zero-copy completions belong to loans";
            let to = SendMethod::Zerocopy.fallback().map_or("", SendMethod::name);
            self.record_fallback(SendMethod::Zerocopy, to, reason.into());
        }
    }

    /// Whether the completions of the socket belong to the method `zerocopy`, because it has been
    /// used.
    pub fn owns_completions(&self) -> bool {
        self.attached_methods.iter().any(|(method, _)| *method == SendMethod::Zerocopy)
    }

    /// The method that was used last.
    pub fn latest(&self) -> Option<SendMethod> {
        self.latest
    }

    /// The counters of each method that was used, in the order of first use.
    pub fn counts(&self) -> Vec<(SendMethod, Counts)> {
        self.attached_methods
            .iter()
            .map(|(method, attached)| (*method, attached.counts()))
            .collect()
    }

    /// The bytes that were sent by all methods.
    pub fn sent_bytes(&self) -> u64 {
        self.attached_methods.iter().map(|(_, attached)| attached.counts().bytes).sum()
    }

    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// Processes the completions that have arrived; returns the number of sends still in flight.
    pub fn process_completions(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.attached_methods
            .iter_mut()
            .map(|(_, attached)| attached.process_completions(socket))
            .sum()
    }

    /// The number of sends in flight whose completions the socket's error queue reports.
    pub fn sends_in_flight(&self) -> usize {
        self.attached_methods.iter().map(|(_, attached)| attached.sends_in_flight()).sum()
    }

    fn attached_method(
        &mut self,
        method: SendMethod,
        socket: BorrowedFd<'_>,
        other_bytes: u64,
    ) -> Result<&mut Box<dyn AttachedMethod>, Error> {
        let found = self.attached_methods.iter().position(|(other, _)| *other == method);
        let index = found.unwrap_or(self.attached_methods.len());
        if found.is_none() {
            let mut options = self.settings.options.clone();
            options.own_bytes = other_bytes + self.sent_bytes();
            if !matches!(self.settings.choice, MethodChoice::Method(_)) {
                options.chunk_bytes = call_bytes(method);
            }
            self.attached_methods.push((method, method.attach(socket, &options)?));
        }
        Ok(&mut self.attached_methods[index].1)
    }

    /// Disables a method that the kernel or the socket refuses, and leaves one out for a while that
    /// was refused for many files in a row. A lack of memory or descriptors changes nothing.
    fn record_refusal(&mut self, method: SendMethod, reason: &Error) {
        match reason.refusal() {
            Some(Refusal::Temporary) | None => {}
            Some(Refusal::Lasting) => {
                if !self.disabled.contains(&method) {
                    self.disabled.push(method);
                }
            }
            Some(Refusal::OfFile) => {
                let found = self.refusals.iter().position(|other| other.method == method);
                let index = found.unwrap_or(self.refusals.len());
                if found.is_none() {
                    self.refusals.push(Refusals { method, count: 0, skipped_sends: 0 });
                }
                let refusals = &mut self.refusals[index];
                refusals.count += 1;
                if refusals.count >= REFUSALS_MAX {
                    refusals.skipped_sends = SKIPPED_SENDS;
                }
            }
        }
    }

    /// Records a fallback from a method.
    fn record_fallback(&mut self, method: SendMethod, to: &'static str, reason: String) {
        fallback::record(&mut self.fallbacks, Fallback { from: method.name(), to, reason });
    }

    /// Whether the kernel has copied every byte of a method that it should not copy, and enough of
    /// them.
    fn has_only_copied(&self, method: SendMethod) -> bool {
        let found = self.attached_methods.iter().find(|(other, _)| *other == method);
        found.is_some_and(|(_, attached)| {
            attached.kernel_copied_bytes() >= COPIED_BYTES_BEFORE_FALLBACK
                && attached.counts().zero_copied_bytes == 0
        })
    }
}
