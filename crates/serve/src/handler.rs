//! The file service's part of an event loop: what all connections of the loop share.
//!
//! It has three parts: what is fixed for the service's life ([`Fixed`]), scratch memory
//! ([`Scratch`]) and accounting ([`Accounting`]); and the loop's caches.

use crate::clock::ResponseClock;
use crate::config::{Config, Limits};
use crate::counters::Counters;
use crate::files::cache::{FileCache, ValidationEpoch};
use crate::files::service::{LookupResult, Service};
use crate::log::{AccessLog, LogEntry};
use crate::response::builder::{Response, ResponseBuilder};
use crate::response::writer::ResponseWriter;
use crate::secrets::{Secrets, SharedSecrets};
use crate::upload_file::Removals;
use haul::SendSettings;
use haul_fs::Blocking;
use haul_http::target::Target;
use haul_server::LogLimiter;
use haul_server::admission::Admission;
use haul_server::admission::eviction::Progress;
use haul_server::admission::network::NetworkLimit;
use haul_server::event_loop::{EVENTS_MAX, LoopSettings};
use haul_server::ktls::KtlsSupport;
use lru::LruCache;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The input buffer, in bytes: a few dozen requests of a pipelining client.
const INPUT_BYTES: usize = 32 << 10;
/// The capacity of a response head's buffer, in bytes. Most heads are shorter.
const HEAD_BYTES: usize = 512;
/// Files that are changing are copied in pieces of this size, which fits a second-level cache.
const COPY_BYTES: usize = 64 << 10;
/// Logins that need no new verification.
const KNOWN_LOGINS_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// One send in so many is timed. A prime, so that a response of two or four sends has each of them
/// timed in the long run.
const TIMER_SAMPLE_INTERVAL: u32 = 127;

/// What is fixed for the service's life.
#[derive(Debug)]
pub struct Fixed {
    pub service: Arc<Service>,
    pub send_settings: Arc<SendSettings>,
    pub ktls: KtlsSupport,
    pub limits: Limits,
    pub removals: Removals,
}

/// Memory that every connection of the loop uses in turn.
#[derive(Debug)]
pub struct Scratch {
    /// Receives request heads.
    pub input: Vec<u8>,
    /// Receives response heads.
    pub head: Vec<u8>,
    /// Copies files that are changing.
    pub copy: Box<[u8]>,
    /// Writers of responses that were sent, with their buffers.
    #[expect(clippy::vec_box, reason = "a connection's state takes the box as it is")]
    writers: Vec<Box<ResponseWriter>>,
}

/// Counters and the access log.
#[derive(Debug)]
pub struct Accounting {
    pub counters: Arc<Counters>,
    pub log: AccessLog,
    /// Sends since the last that was timed.
    sends_since_timer: u32,
    pub dropped_lines: LogLimiter,
}

/// The file service on one event loop.
#[derive(Debug)]
pub struct FileHandler {
    pub fixed: Fixed,
    pub scratch: Scratch,
    pub accounting: Accounting,
    pub clock: ResponseClock,
    secrets: Secrets,
    /// The version of `secrets`.
    secrets_version: u64,
    /// The secrets of all loops, replaced by a reload.
    shared_secrets: Arc<SharedSecrets>,
    /// Hashes of `Authorization` fields that were accepted.
    pub known_logins: LruCache<blake3::Hash, ()>,
    pub cache: FileCache,
    /// The validation epoch: a file that `fstat` found unchanged in it needs no further check.
    /// Bytes from a client and replies of offload threads begin a new one.
    pub epoch: ValidationEpoch,
    /// Whether partial segments are held, to be flushed together.
    pub holds: bool,
    /// The second of the clock in which the service began to drain. From then on each connection
    /// closes after its response.
    pub drain_began_at_seconds: Option<u32>,
}

impl FileHandler {
    /// Whether the service drains.
    pub fn is_draining(&self) -> bool {
        self.drain_began_at_seconds.is_some()
    }
}

/// Measures CPU time of the calling thread.
#[derive(Debug)]
pub struct CpuTimer(Timespec);

impl CpuTimer {
    fn start() -> Self {
        Self(clock_gettime(ClockId::ThreadCPUTime))
    }

    /// The CPU time since the start.
    pub fn elapsed(&self) -> Option<Duration> {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).ok()?.checked_sub(Duration::try_from(self.0).ok()?)
    }
}

impl FileHandler {
    /// The handler of one of `loops` event loops.
    pub fn new(
        config: &Config,
        loops: usize,
        service: Arc<Service>,
        secrets: Arc<SharedSecrets>,
        ktls: KtlsSupport,
        log: AccessLog,
        removals: Removals,
    ) -> Self {
        let limits = config.limits;
        let choice = config.choice.clone();
        // The version before the secrets: if a reload comes between, the secrets are taken again.
        let (secrets_version, current_secrets) = (secrets.version(), secrets.get());
        let send_settings = Arc::new(SendSettings::default().with_choice(choice));
        Self {
            fixed: Fixed { service, send_settings, ktls, limits, removals },
            scratch: Scratch {
                input: Vec::with_capacity(INPUT_BYTES.max(limits.head_bytes_max)),
                head: Vec::with_capacity(HEAD_BYTES),
                copy: vec![0; COPY_BYTES].into(),
                writers: Vec::with_capacity(EVENTS_MAX),
            },
            accounting: Accounting {
                counters: Arc::default(),
                log,
                sends_since_timer: 0,
                dropped_lines: LogLimiter::default(),
            },
            clock: ResponseClock::new(),
            secrets: current_secrets,
            secrets_version,
            shared_secrets: secrets,
            known_logins: LruCache::new(KNOWN_LOGINS_MAX),
            cache: FileCache::new(limits.cached_files_max / loops, limits.cached_bytes_max / loops),
            epoch: ValidationEpoch::default(),
            holds: false,
            drain_began_at_seconds: None,
        }
    }

    /// The event loop's settings, for one of `loops`.
    pub fn loop_settings(limits: &Limits, loops: usize) -> LoopSettings {
        LoopSettings::default()
            .with_admission(Admission::WaitingRoom {
                connections_max: limits.connections_max.div_ceil(loops),
                // At least one connection has to wait until another one is closed.
                waiting_max: (limits.waiting_max / loops).max(1),
            })
            .with_network_limit(limits.connections_per_address_max.map(NetworkLimit::new))
            .with_drain_timeout(limits.drain_timeout)
            .with_rate_bytes_per_second(limits.rate_bytes_per_second)
    }

    /// Builds a response, with its head in [`Scratch::head`].
    pub fn response(&mut self) -> ResponseBuilder<'_> {
        ResponseBuilder {
            service: &self.fixed.service,
            clock: &self.clock,
            head: &mut self.scratch.head,
            varies_by_accept: false,
        }
    }

    /// A writer of a response whose head is in [`Scratch::head`].
    pub fn writer(
        &mut self,
        response: Response,
        log_entry: Option<LogEntry>,
        received: Instant,
    ) -> Box<ResponseWriter> {
        let writer = ResponseWriter {
            head: std::mem::take(&mut self.scratch.head),
            body: response.body,
            closes: !response.keeps_alive,
            log_entry,
            received,
            accepted_at: self.clock.seconds(),
            progress: Progress::new(self.clock.seconds()),
            resident: 0..0,
        };
        let Some(mut reused) = self.scratch.writers.pop() else {
            self.scratch.head = Vec::with_capacity(HEAD_BYTES);
            return Box::new(writer);
        };
        self.scratch.head = std::mem::replace(&mut *reused, writer).head;
        reused
    }

    /// Finds what a target stands for; `None` if the lookup would block.
    pub fn find(&mut self, target: &str) -> Option<LookupResult> {
        if let Some(resource) = self.cache.get(key(target), self.clock.seconds(), self.epoch) {
            return Some(LookupResult::Resource(resource));
        }
        let found = match Target::parse(target) {
            // Without blocking, the only error is that it would block.
            Ok(parsed) => self.fixed.service.find(&parsed, Blocking::None).ok()?,
            Err(error) => Service::refuse(error),
        };
        self.cache_found(target, &found);
        Some(found)
    }

    /// Caches what was found, if it is a separate file, instead of what was cached before.
    pub fn cache_found(&mut self, target: &str, found: &LookupResult) {
        match found {
            LookupResult::Resource(resource) if !resource.is_fallback => {
                self.cache.put(key(target), resource, self.clock.seconds());
            }
            _ => self.cache.remove(key(target)),
        }
    }

    /// The secrets in force. After a reload, clients that the former passwords admitted are
    /// verified again.
    pub fn secrets(&mut self) -> &Secrets {
        let version = self.shared_secrets.version();
        if version != self.secrets_version {
            self.secrets_version = version;
            self.replace_secrets(self.shared_secrets.get());
        }
        &self.secrets
    }

    fn replace_secrets(&mut self, secrets: Secrets) {
        let is_same = match (&secrets.passwords, &self.secrets.passwords) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        if !is_same {
            self.known_logins.clear();
        }
        self.secrets = secrets;
    }
}

impl Scratch {
    /// Takes back the memory of a response that was sent.
    pub fn reuse(&mut self, writer: Box<ResponseWriter>) {
        if self.writers.len() < EVENTS_MAX && writer.head.capacity() <= 8 * HEAD_BYTES {
            self.writers.push(writer);
        }
    }
}

impl Accounting {
    /// Starts a timer for one send in [`TIMER_SAMPLE_INTERVAL`], because reading the CPU clock is a
    /// system call.
    pub fn start_sampled_timer(&mut self) -> Option<CpuTimer> {
        self.sends_since_timer += 1;
        if self.sends_since_timer < TIMER_SAMPLE_INTERVAL {
            return None;
        }
        self.sends_since_timer = 0;
        Some(CpuTimer::start())
    }
}

/// The part of a target that decides which file it stands for.
fn key(target: &str) -> &str {
    target.find(['?', '#']).map_or(target, |end| &target[..end])
}
