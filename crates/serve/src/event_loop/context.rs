//! What an event loop lends to whichever connection it drives: memory that is used again, what is known already, the time.

use crate::clock::Clock;
use crate::config::{Config, Limits};
use crate::counters::Counters;
use crate::event_loop::kernel_tls::Supported;
use crate::event_loop::sending::Sending;
use crate::files::cache::{Cache, Moment};
use crate::files::service::{Found, Service};
use crate::log::{Log, Logged};
use crate::response::answer::Answering;
use crate::response::body::Body;
use crate::secrets::Secrets;
use haul_fs::Blocking;
use haul_http::target::Target;
use lru::LruCache;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests are read into room for so many bytes: a few dozen of a pipelining client's.
const INPUT_BYTES: usize = 32 << 10;
/// Most heads of responses are shorter.
const HEAD_BYTES: usize = 512;
/// Events that a turn takes: the more, the more responses leave together, and the longer does the first of them wait and the more
/// memory may be read ahead (as much as the longest head for each). 512 gained nothing over 128.
pub const EVENTS_MAX: usize = 128;
/// Files that are changing are copied in pieces of this size, which stays in a second-level cache.
const COPY_BYTES: usize = 64 << 10;

/// Users whose password need not be tried again.
const KNOWN_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// One send in so many is timed. A prime: responses of two or four sends each have all of them timed in the end.
const TIMED_EVERY: u32 = 127;

/// Measures CPU time of the calling thread.
#[derive(Debug)]
pub struct Timer(Timespec);

impl Timer {
    fn start() -> Self {
        Self(clock_gettime(ClockId::ThreadCPUTime))
    }

    /// CPU time since it was started.
    pub fn elapsed(&self) -> Option<Duration> {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).ok()?.checked_sub(Duration::try_from(self.0).ok()?)
    }
}

/// What an event loop lends to whichever connection it drives.
#[derive(Debug)]
pub struct Context {
    /// What is served.
    pub service: Arc<Service>,
    /// How sockets are sent through.
    pub settings: Arc<haul::SendSettings>,
    /// The certificate and the passwords.
    pub secrets: Secrets,
    /// What the kernel can encrypt.
    pub kernel_tls: Supported,
    /// Hashes of the `Authorization` fields that those passwords let in.
    pub known: LruCache<blake3::Hash, ()>,
    /// What clients may take.
    pub limits: Limits,
    /// The time.
    pub clock: Clock,
    /// Files that are kept open.
    pub cache: Cache,
    /// Where requests are noted.
    pub log: Log,
    /// What has been done.
    pub counters: Arc<Counters>,
    /// Where heads of requests are read to.
    pub input: Vec<u8>,
    /// Where heads of responses are written.
    pub head: Vec<u8>,
    /// Memory of responses that have gone, for others.
    #[expect(clippy::vec_box, reason = "a connection takes it as it is")]
    spare: Vec<Box<Sending>>,
    /// Where files that are changing are copied through.
    pub copy: Box<[u8]>,
    /// For whom a look at a file is good. It ends with everything that is heard, from a client or from a helper.
    pub moment: Moment,
    /// Whether what is shorter than a packet is held back, to be released together with others.
    pub holds: bool,
    /// Sends since the last that was timed.
    untimed: u32,
    /// Whether the server is about to stop: each connection ends after its response.
    pub is_draining: bool,
}

impl Context {
    /// What one of so many loops lends.
    pub fn new(
        config: &Config,
        workers: usize,
        service: Arc<Service>,
        secrets: Secrets,
        kernel_tls: Supported,
        log: Log,
    ) -> Self {
        let limits = config.limits;
        let settings =
            haul::SendSettings { choice: config.choice.clone(), ..haul::SendSettings::default() };
        Self {
            service,
            settings: Arc::new(settings),
            secrets,
            kernel_tls,
            known: LruCache::new(KNOWN_MAX),
            limits,
            clock: Clock::new(),
            cache: Cache::new(limits.cached_files_max / workers, limits.cached_bytes_max / workers),
            log,
            counters: Arc::default(),
            input: Vec::with_capacity(INPUT_BYTES.max(limits.head_bytes_max)),
            head: Vec::with_capacity(HEAD_BYTES),
            spare: Vec::with_capacity(EVENTS_MAX),
            copy: vec![0; COPY_BYTES].into(),
            moment: Moment::default(),
            holds: false,
            untimed: 0,
            is_draining: false,
        }
    }

    /// Writes responses into [`Context::head`].
    pub fn answering(&mut self) -> Answering<'_> {
        Answering { service: &self.service, clock: &self.clock, head: &mut self.head }
    }

    /// A response whose head is in [`Context::head`], in memory of its own.
    pub fn ready(
        &mut self,
        body: Body,
        closes: bool,
        logged: Option<Logged>,
        started: Instant,
    ) -> Box<Sending> {
        let head = std::mem::take(&mut self.head);
        let moved_at = self.clock.seconds();
        let ready = Sending { head, body, closes, logged, started, moved_at, warm: 0..0 };
        let Some(mut place) = self.spare.pop() else {
            self.head = Vec::with_capacity(HEAD_BYTES);
            return Box::new(ready);
        };
        self.head = std::mem::replace(&mut *place, ready).head;
        place
    }

    /// Takes back the memory of a response that has gone.
    pub fn reuse(&mut self, sent: Box<Sending>) {
        if self.spare.len() < EVENTS_MAX && sent.head.capacity() <= 8 * HEAD_BYTES {
            self.spare.push(sent);
        }
    }

    /// Has other secrets from now on. Whoever the former passwords have let in has to show his again.
    pub fn renew(&mut self, secrets: Secrets) {
        let is_same = match (&secrets.passwords, &self.secrets.passwords) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        if !is_same {
            self.known.clear();
        }
        self.secrets = secrets;
    }

    /// A timer for one send in so many: reading the clock is a system call.
    pub fn timer(&mut self) -> Option<Timer> {
        self.untimed += 1;
        if self.untimed < TIMED_EVERY {
            return None;
        }
        self.untimed = 0;
        Some(Timer::start())
    }

    /// What stands for a target, or `None` where the disk would have to be waited for.
    pub fn find(&mut self, target: &str) -> Option<Found> {
        if let Some(resource) = self.cache.get(key(target), self.clock.seconds(), self.moment) {
            return Some(Found::Resource(resource));
        }
        let found = match Target::parse(target) {
            // Without blocking nothing but having to wait is an error.
            Ok(parsed) => self.service.find(&parsed, false, Blocking::None).ok()?,
            Err(error) => Service::refuse(error),
        };
        self.keep(target, &found);
        Some(found)
    }

    /// Keeps what was found, if that is a file of its own, and forgets what was there before.
    pub fn keep(&mut self, target: &str, found: &Found) {
        match found {
            Found::Resource(resource) if !resource.is_fallback => {
                self.cache.put(key(target), resource, self.clock.seconds());
            }
            _ => self.cache.remove(key(target)),
        }
    }
}

/// The part of a target that decides which file it stands for.
fn key(target: &str) -> &str {
    target.find(['?', '#']).map_or(target, |end| &target[..end])
}
