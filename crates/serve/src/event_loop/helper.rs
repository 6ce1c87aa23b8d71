//! Threads that wait for the disk, and one that tries passwords, so that no event loop does.
//!
//! A loop asks the kernel for what is in memory and hands the rest over here. The answer comes back through the loop's
//! [`Inbox`], which wakes it. The locks here are taken only on that cold way.

use crate::event_loop::wake::Wake;
use crate::files::resource::Representation;
use crate::files::service::{Found, Service, status_of};
use crate::join::join_soon;
use crate::passwords::Passwords;
use haul_fs::Blocking;
use haul_fs::{AtomicFile, Committed};
use haul_http::credentials::Credentials;
use haul_http::request::Request;
use haul_http::status::Status;
use haul_http::target::Target;
use rustix::fs::Advice;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU64;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use tracing::warn;

/// How far ahead of what is sent next a file is asked for.
const AHEAD_BYTES: u64 = 4 << 20;
/// How much of that is waited for: the rest comes in while this is sent.
pub const AWAITED_BYTES: u64 = 2 << 20;
/// Readahead comes in pieces of this size or more (`read_ahead_kb` of most disks).
const STEP_BYTES: usize = 128 << 10;

/// Passwords that wait to be tried. Whoever guesses makes others wait for their turn, but not for ever.
const UNTRIED_MAX: usize = 64;
/// Of those, from one address (of IPv6, one network of 64 bits, which is what one customer has): the others are for others.
const UNTRIED_BY_ONE_MAX: usize = 32;
/// Of those, other ones than the one that is asked for: a browser asks for one thing on several connections at once, and once is
/// enough; who guesses asks for many.
const GUESSES_BY_ONE_MAX: usize = 4;

/// What a loop wants to know.
#[derive(Debug)]
pub enum Question {
    /// What stands for this target? A listing as JSON where that is accepted.
    Find { target: String, accepts_json: bool },
    /// Have these bytes in memory; at most [`AWAITED_BYTES`] of them are waited for.
    Warm(Arc<Representation>, Range<u64>),
    /// Begin a file for this target.
    Begin(String),
    /// Put a file into its place; where it must be new, not into another's.
    Finish { upload: Box<AtomicFile>, only_new: bool },
    /// Is it they?
    Try(Attempt),
}

/// Somebody who wants to be let in.
#[derive(Debug)]
pub struct Attempt {
    /// What his password must fit.
    pub passwords: Arc<Passwords>,
    /// Who he says that he is.
    pub credentials: Credentials,
    /// The hash of the field that says so.
    pub field: blake3::Hash,
    /// Where he is; `None` behind a Unix socket.
    pub address: Option<IpAddr>,
}

/// What came of it.
#[derive(Debug)]
pub enum Reply {
    /// This stands for the target.
    Found(Found),
    /// The bytes are in memory, or the file gives none: sending will tell.
    Warm,
    /// A file to write into, or why there is none.
    Begun(Result<Box<AtomicFile>, Status>),
    /// What has become of it.
    Finished(Status),
    /// Whether they are in that file with that password.
    Tried(Arc<Passwords>, bool),
    /// Too many ask the same.
    Busy,
    /// The helper has panicked over the question.
    Failed,
}

/// Replies that wait for one loop.
#[derive(Debug)]
pub struct Inbox {
    replies: Mutex<Vec<(u64, Reply)>>,
    wake: Arc<Wake>,
}

/// The threads: those for the disk, and one for passwords, lest guessing keep the others from their files.
#[derive(Debug)]
pub struct Helpers {
    disk: Arc<Shared>,
    passwords: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Where loops leave their questions.
#[derive(Debug, Clone)]
pub struct Asker {
    disk: Arc<Shared>,
    passwords: Arc<Shared>,
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
struct Shared {
    service: Arc<Service>,
    queue: Mutex<Queue>,
    jobs_max: usize,
    is_filled: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

#[derive(Debug)]
struct Job {
    token: u64,
    question: Question,
    inbox: Arc<Inbox>,
}

impl Queue {
    /// Whether whoever asks this has asked enough.
    fn has_too_many_like(&self, question: &Question) -> bool {
        let Question::Try(attempt) = question else { return false };
        let Some(network) = attempt.network() else { return false };
        let attempts = self.jobs.iter().filter_map(|job| match &job.question {
            Question::Try(other) if other.network() == Some(network) => Some(other),
            _ => None,
        });
        let (of_one, guesses) = attempts.fold((0, 0), |(of_one, guesses), other| {
            (of_one + 1, guesses + usize::from(other.field != attempt.field))
        });
        of_one >= UNTRIED_BY_ONE_MAX || guesses >= GUESSES_BY_ONE_MAX
    }
}

impl Attempt {
    /// Whose turn it takes.
    fn network(&self) -> Option<IpAddr> {
        Some(match self.address?.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address @ IpAddr::V4(_) => address,
        })
    }

    /// Whether he is in. He may have come on another connection meanwhile.
    fn is_accepted(&self) -> bool {
        let Self { passwords, credentials, field, .. } = self;
        let accepted = passwords.knows(field) || passwords.accept(credentials);
        if accepted {
            passwords.remember(*field);
        }
        accepted
    }
}

impl Question {
    /// What stands for a request's target.
    pub fn of(request: &Request<'_>) -> Self {
        Self::Find { target: request.target.to_owned(), accepts_json: request.accepts_json() }
    }
}

impl Inbox {
    /// An inbox whose owner is woken by `wake`.
    pub fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { replies: Mutex::default(), wake })
    }

    /// What has come in, each with the token it was asked with.
    pub fn take(&self) -> Vec<(u64, Reply)> {
        std::mem::take(&mut *lock(&self.replies))
    }

    fn put(&self, token: u64, reply: Reply) {
        lock(&self.replies).push((token, reply));
        self.wake.wake();
    }
}

impl Helpers {
    /// Starts so many threads for the disk, and the other one where there are passwords.
    pub fn start(
        service: &Arc<Service>,
        disk_threads: usize,
        has_passwords: bool,
    ) -> std::io::Result<Self> {
        let shared = |jobs_max| {
            let (queue, is_filled) = (Mutex::default(), Condvar::new());
            Arc::new(Shared { service: Arc::clone(service), queue, jobs_max, is_filled })
        };
        // There is at most one question for each connection.
        let (disk, passwords) = (shared(usize::MAX), shared(UNTRIED_MAX));
        let kinds = [
            (&disk, "haul-disk", disk_threads),
            (&passwords, "haul-passwords", has_passwords.into()),
        ];
        let mut threads = Vec::new();
        for (shared, name, count) in kinds {
            for _ in 0..count {
                let shared = Arc::clone(shared);
                threads.push(
                    std::thread::Builder::new().name(name.into()).spawn(move || shared.work())?,
                );
            }
        }
        Ok(Self { disk, passwords, threads })
    }

    /// Where the owner of `inbox` leaves its questions.
    pub fn asker(&self, inbox: &Arc<Inbox>) -> Asker {
        Asker {
            disk: Arc::clone(&self.disk),
            passwords: Arc::clone(&self.passwords),
            inbox: Arc::clone(inbox),
        }
    }
}

impl Drop for Helpers {
    /// Waits a moment for what is being read; a disk that hangs is left alone.
    fn drop(&mut self) {
        for shared in [&self.disk, &self.passwords] {
            let mut queue = lock(&shared.queue);
            queue.is_closed = true;
            queue.jobs.clear();
            drop(queue);
            shared.is_filled.notify_all();
        }
        for thread in self.threads.drain(..) {
            join_soon(thread);
        }
    }
}

impl Asker {
    /// Leaves a question; the reply comes with the same token.
    pub fn ask(&self, token: u64, question: Question) {
        let shared =
            if matches!(question, Question::Try(_)) { &self.passwords } else { &self.disk };
        let mut queue = lock(&shared.queue);
        if queue.jobs.len() >= shared.jobs_max || queue.has_too_many_like(&question) {
            return self.inbox.put(token, Reply::Busy);
        }
        queue.jobs.push_back(Job { token, question, inbox: Arc::clone(&self.inbox) });
        drop(queue);
        shared.is_filled.notify_one();
    }
}

impl Shared {
    fn begin(&self, target: &str) -> Result<Box<AtomicFile>, Status> {
        let target = Target::parse(target).map_err(|_| Status::NOT_FOUND)?;
        let begun = AtomicFile::create_below(&self.service.root, &target.path);
        begun.map(Box::new).map_err(|error| refused_write(&target.path, &error))
    }

    fn work(&self) {
        while let Some(Job { token, question, inbox }) = self.next() {
            // Whoever asked waits for a reply, whatever has gone wrong here.
            let reply = catch_unwind(AssertUnwindSafe(|| self.reply(question)));
            inbox.put(token, reply.unwrap_or(Reply::Failed));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.is_closed {
                return None;
            }
            queue = self.is_filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn reply(&self, question: Question) -> Reply {
        match question {
            Question::Find { target, accepts_json } => Reply::Found(match Target::parse(&target) {
                Ok(target) => self
                    .service
                    .find(&target, accepts_json, Blocking::Disk)
                    .unwrap_or(Found::Nothing(Status::INTERNAL_ERROR)),
                Err(error) => Service::refuse(error),
            }),
            Question::Begin(target) => Reply::Begun(self.begin(&target)),
            Question::Finish { upload, only_new } => {
                let name = upload.name().to_owned();
                Reply::Finished(match upload.commit(only_new) {
                    Ok(Committed::Created) => Status::CREATED,
                    Ok(Committed::Replaced) => Status::NO_CONTENT,
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                        Status::PRECONDITION_FAILED
                    }
                    Err(error) => refused_write(&name, &error),
                })
            }
            Question::Warm(form, range) => {
                warm(&form, range);
                Reply::Warm
            }
            Question::Try(attempt) => {
                let accepted = attempt.is_accepted();
                Reply::Tried(attempt.passwords, accepted)
            }
        }
    }
}

/// What a client is told about a file that cannot be written; whoever runs the service is told where it is his to mend.
fn refused_write(path: &[u8], error: &std::io::Error) -> Status {
    let status = status_of_write(error);
    if status != Status::CONFLICT {
        let path = path.escape_ascii();
        warn!(status = status.code, %path, %error, "{path} cannot be put here: {error}");
    }
    status
}

/// What a client is told about a file that cannot be written.
fn status_of_write(error: &std::io::Error) -> Status {
    match Errno::from_io_error(error) {
        // A folder that is not there, or one where a file was to be (RFC 4918 section 9.7.1).
        Some(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Status::CONFLICT,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Status::INSUFFICIENT_STORAGE,
        Some(Errno::ROFS) => Status::FORBIDDEN,
        _ => status_of(error),
    }
}

/// Has a file's bytes read into memory. A disk that fails shows when they are sent.
fn warm(form: &Representation, range: Range<u64>) {
    let file = form.object.file();
    let ahead = NonZeroU64::new((range.end - range.start).min(AHEAD_BYTES));
    let _ = rustix::fs::fadvise(file, range.start, ahead, Advice::WillNeed);
    let awaited = range.start..range.end.min(range.start + AWAITED_BYTES);
    let last = awaited.end.saturating_sub(1);
    for at in awaited.step_by(STEP_BYTES).chain([last]) {
        if !matches!(rustix::io::pread(file, &mut [0], at), Ok(1)) {
            break;
        }
    }
}

/// A lock whose holder has panicked is as good as any here: what it guards is a list.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANN: &str = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG";

    #[test]
    fn one_address_has_its_share_of_the_places_and_no_more() {
        let passwords = Arc::new(Passwords::parse(ANN).unwrap());
        let inbox = Inbox::new(Arc::new(Wake::new().unwrap()));
        let mut queue = Queue::default();
        let mut takes = |address: Option<&str>, guess: usize| {
            let credentials = Credentials { user: "ann".into(), password: b"open".to_vec() };
            let address = address.map(|address| address.parse().unwrap());
            let field = blake3::hash(&guess.to_ne_bytes());
            let passwords = Arc::clone(&passwords);
            let question = Question::Try(Attempt { passwords, credentials, field, address });
            let takes = !queue.has_too_many_like(&question);
            if takes {
                queue.jobs.push_back(Job { token: 0, question, inbox: Arc::clone(&inbox) });
            }
            takes
        };
        let mut taken = |addresses: &[&str]| {
            (0..20).filter(|&at| takes(Some(addresses[at % addresses.len()]), at)).count()
        };
        assert_eq!(taken(&["192.0.2.1", "::ffff:192.0.2.1"]), GUESSES_BY_ONE_MAX);
        assert_eq!(
            taken(&["2001:db8::1", "2001:db8::2"]),
            GUESSES_BY_ONE_MAX,
            "one customer's network"
        );
        assert_eq!(taken(&["192.0.2.2"]), GUESSES_BY_ONE_MAX);
        let same = (0..100).filter(|_| takes(Some("192.0.2.3"), 7)).count();
        assert_eq!(same, UNTRIED_BY_ONE_MAX, "a browser's connections all say the same");
        assert!(
            (0..20).all(|at| takes(None, at)),
            "behind a Unix socket nobody is told from another"
        );
    }
}
