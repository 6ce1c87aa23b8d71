//! [`MethodSelector`]: chooses the send method for files and memory, by plan or by setting, and
//! falls back where it must.

use crate::error::{Error, Refusal};
use crate::fallback::{self, COPIED_BYTES_BEFORE_FALLBACK, Fallback};
use crate::method::{AttachedMethod, Counts, SendMethod};
use crate::plan::{Condition, Plan, SourceKind, call_bytes};
use crate::settings::{MethodChoice, SendSettings};
use crate::source::Source;
use haul_sys::fork;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Consecutive refusals, each of which may be the file's, after which a method is not tried again.
const REFUSALS_MAX: u32 = 8;

/// The send methods of one socket.
pub(crate) struct MethodSelector {
    settings: Arc<SendSettings>,
    /// The methods that were used, in the order of first use. Disabled ones stay: the kernel may
    /// still hold pages that they lent.
    attached_methods: Vec<(SendMethod, Box<dyn AttachedMethod>)>,
    disabled: Vec<SendMethod>,
    fallbacks: Vec<Fallback>,
    latest: Option<SendMethod>,
    /// Consecutive refusals of each method.
    refusals: Vec<(SendMethod, u32)>,
    /// The process that attached the methods ([`fork::generation`]).
    process: u64,
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
            process: fork::generation(),
        }
    }

    /// Sends a prefix of `range`, which must not be empty; returns the bytes that the socket
    /// accepted.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: &Range<u64>,
    ) -> Result<u64, Error> {
        if self.process != fork::generation() {
            self.leave_rings_to_parent();
        }
        let mut refused: Vec<SendMethod> = Vec::new();
        loop {
            let method = self.choose_without(&refused, source, range);
            let sent = self
                .bound_method(method, socket)
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
                    self.refusals.retain(|(other, _)| *other != method);
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
        let is_allowed =
            |method: SendMethod| !self.disabled.contains(&method) && !refused.contains(&method);
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
        if !self.disabled.contains(&SendMethod::Zerocopy) {
            self.disabled.push(SendMethod::Zerocopy);
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

    /// Gives up the io_uring rings that the parent of a forked child uses. Their memory is shared,
    /// so it is leaked and not touched.
    fn leave_rings_to_parent(&mut self) {
        let (inherited, own) = std::mem::take(&mut self.attached_methods)
            .into_iter()
            .partition(|(method, _)| method.has_ring());
        self.attached_methods = own;
        Vec::into_iter(inherited).for_each(std::mem::forget);
        self.process = fork::generation();
    }

    fn bound_method(
        &mut self,
        method: SendMethod,
        socket: BorrowedFd<'_>,
    ) -> Result<&mut Box<dyn AttachedMethod>, Error> {
        let found = self.attached_methods.iter().position(|(other, _)| *other == method);
        let index = found.unwrap_or(self.attached_methods.len());
        if found.is_none() {
            let mut options = self.settings.options.clone();
            if !matches!(self.settings.choice, MethodChoice::Method(_)) {
                options.chunk_bytes = call_bytes(method);
            }
            self.attached_methods.push((method, method.attach(socket, &options)?));
        }
        Ok(&mut self.attached_methods[index].1)
    }

    /// Disables a method that the kernel or the socket refuses, and one that was refused for many
    /// files in a row.
    fn record_refusal(&mut self, method: SendMethod, reason: &Error) {
        let earlier = self.refusals.iter().find(|(other, _)| *other == method);
        let count = 1 + earlier.map_or(0, |(_, count)| *count);
        self.refusals.retain(|(other, _)| *other != method);
        self.refusals.push((method, count));
        let is_of_socket = reason.refusal() == Some(Refusal::Lasting) || count >= REFUSALS_MAX;
        if is_of_socket && !self.disabled.contains(&method) {
            self.disabled.push(method);
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
