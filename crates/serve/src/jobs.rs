//! Calls of the file service that may block: lookups, pages that are not in memory, uploads,
//! passwords.
//!
//! An event loop asks the kernel for what is in memory and offloads the rest. Passwords have a pool
//! of their own, so that guessing does not delay files.

use crate::files::resource::Representation;
use crate::files::service::{LookupResult, Service, status_of};
use crate::handler::FileHandler;
use crate::passwords::Passwords;
use crate::upload_file::{Removals, UploadFile};
use haul::Source;
use haul_fs::{AtomicFile, Blocking, Committed};
use haul_http::credentials::Credentials;
use haul_http::request::Request;
use haul_http::status::Status;
use haul_http::target::Target;
use haul_server::admission::network::Network;
use haul_server::offload::{Job, PoolSettings, Queued};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Threads for the disk: the number of requests that a disk works on at a time.
const DISK_THREADS: usize = 8;
/// Passwords that may wait for verification.
const UNVERIFIED_MAX: usize = 64;
/// Of these, passwords from one network.
const UNVERIFIED_PER_NETWORK_MAX: usize = 32;
/// Of these, different passwords: a browser sends the same one on several connections, a guesser
/// different ones.
const GUESSES_PER_NETWORK_MAX: usize = 4;

/// Threads for listings. One that reads a large directory delays only other listings.
const LISTING_THREADS: usize = 2;
/// Listings that may wait for a thread. The next request is refused.
const UNLISTED_MAX: usize = 256;
/// Of these, listings for one network.
const UNLISTED_PER_NETWORK_MAX: usize = 64;

const DISK_POOL: usize = 0;
const PASSWORD_POOL: usize = 1;
const LISTING_POOL: usize = 2;

/// A call that may block.
#[derive(Debug)]
pub enum FileJob {
    /// Finds what a target stands for.
    Find { service: Arc<Service>, target: String },
    /// Lists a directory.
    List(ListingJob),
    /// Reads a range of a file into memory; waits as [`Source::prefetch`] does.
    ReadPages(Arc<Representation>, Range<u64>),
    /// Creates a temporary file for this target.
    BeginUpload { service: Arc<Service>, target: String, removals: Removals },
    /// Gives a file its name. `only_new`: unless the name is taken.
    CommitUpload { service: Arc<Service>, file: Box<UploadFile>, only_new: bool },
    /// Verifies a password.
    VerifyPassword(PasswordCheck),
}

/// A directory to be listed.
#[derive(Debug)]
pub struct ListingJob {
    service: Arc<Service>,
    directory: Arc<File>,
    target: String,
    prefers_json: bool,
    /// `None` for a Unix socket.
    network: Option<Network>,
}

/// A login to be verified.
#[derive(Debug)]
pub struct PasswordCheck {
    /// The passwords to verify it by.
    pub passwords: Arc<Passwords>,
    /// The user and the password.
    pub credentials: Credentials,
    /// The hash of the `Authorization` field.
    pub field: blake3::Hash,
    /// The client's network; `None` for a Unix socket.
    pub network: Option<Network>,
}

/// The reply to a [`FileJob`].
#[derive(Debug)]
pub enum FileReply {
    /// What the target stands for.
    Found(LookupResult),
    /// The pages are in memory, or the file cannot be read: sending finds out.
    PagesRead,
    /// A temporary file, or the reason why there is none.
    UploadBegun(Result<Box<UploadFile>, Status>),
    /// The result of an upload.
    Committed(Status),
    /// Whether the passwords accept the login.
    PasswordVerified(Arc<Passwords>, bool),
    /// Too many similar jobs wait.
    Refused,
    /// The job panicked.
    Failed,
}

/// The pools of threads. Those for passwords and listings have threads only if there are any.
pub fn pools(has_passwords: bool, has_listings: bool) -> [PoolSettings; 3] {
    let listing_threads = if has_listings { LISTING_THREADS } else { 0 };
    // A connection has at most one job.
    [
        PoolSettings::new("haul-disk", DISK_THREADS, usize::MAX),
        PoolSettings::new("haul-passwords", has_passwords.into(), UNVERIFIED_MAX),
        PoolSettings::new("haul-listings", listing_threads, UNLISTED_MAX),
    ]
}

impl FileJob {
    /// The lookup of a request's target.
    pub fn find(request: &Request<'_>, handler: &FileHandler) -> Self {
        Self::Find {
            service: Arc::clone(&handler.fixed.service),
            target: request.target.to_owned(),
        }
    }

    /// The listing of the directory that a request's target stands for.
    pub fn list(
        request: &Request<'_>,
        directory: Arc<File>,
        network: Option<Network>,
        handler: &FileHandler,
    ) -> Self {
        Self::List(ListingJob {
            service: Arc::clone(&handler.fixed.service),
            directory,
            target: request.target.to_owned(),
            prefers_json: request.prefers_json(),
            network,
        })
    }

    /// The job that creates the temporary file of an upload to `target`.
    pub fn begin_upload(target: &str, handler: &FileHandler) -> Self {
        let service = Arc::clone(&handler.fixed.service);
        let removals = handler.fixed.removals.clone();
        Self::BeginUpload { service, target: target.to_owned(), removals }
    }

    /// Whether it may wait for the disk.
    pub fn is_for_disk(&self) -> bool {
        !matches!(self, Self::VerifyPassword(_))
    }
}

impl Job for FileJob {
    type Reply = FileReply;

    fn pool_index(&self) -> usize {
        match self {
            Self::VerifyPassword(_) => PASSWORD_POOL,
            Self::List(_) => LISTING_POOL,
            _ => DISK_POOL,
        }
    }

    fn run(self) -> FileReply {
        match self {
            Self::Find { service, target } => FileReply::Found(match Target::parse(&target) {
                Ok(target) => service
                    .find(&target, Blocking::Disk)
                    .unwrap_or(LookupResult::Nothing(Status::INTERNAL_ERROR)),
                Err(error) => Service::refuse(error),
            }),
            Self::List(ListingJob { service, directory, target, prefers_json, .. }) => {
                FileReply::Found(match Target::parse(&target) {
                    Ok(target) => service.list(&directory, &target, prefers_json),
                    Err(error) => Service::refuse(error),
                })
            }
            Self::ReadPages(form, range) => {
                // A disk error shows when the pages are sent.
                let _ = Source::from(form.object.file()).prefetch(range);
                FileReply::PagesRead
            }
            Self::BeginUpload { service, target, removals } => {
                FileReply::UploadBegun(begin_upload(&service, &target, removals))
            }
            Self::CommitUpload { service, file, only_new } => {
                FileReply::Committed(commit_upload(&service, *file, only_new))
            }
            Self::VerifyPassword(check) => {
                let accepted = check.is_accepted();
                FileReply::PasswordVerified(check.passwords, accepted)
            }
        }
    }

    fn exceeds_share(&self, queued: &VecDeque<Queued<Self>>) -> bool {
        match self {
            Self::VerifyPassword(PasswordCheck { network: Some(network), field, .. }) => {
                let others = queued.iter().filter_map(|queued| match &queued.job {
                    Self::VerifyPassword(other) if other.network == Some(*network) => Some(other),
                    _ => None,
                });
                let (all, guesses) = others.fold((0, 0), |(all, guesses), other| {
                    (all + 1, guesses + usize::from(other.field != *field))
                });
                all >= UNVERIFIED_PER_NETWORK_MAX || guesses >= GUESSES_PER_NETWORK_MAX
            }
            Self::List(ListingJob { network: Some(network), .. }) => {
                let is_of_network = |queued: &&Queued<Self>| match &queued.job {
                    Self::List(other) => other.network == Some(*network),
                    _ => false,
                };
                queued.iter().filter(is_of_network).count() >= UNLISTED_PER_NETWORK_MAX
            }
            _ => false,
        }
    }

    fn refused() -> FileReply {
        FileReply::Refused
    }

    fn failed() -> FileReply {
        FileReply::Failed
    }
}

impl PasswordCheck {
    /// Whether the login is accepted. Another connection may have verified the login by now.
    fn is_accepted(&self) -> bool {
        let Self { passwords, credentials, field, .. } = self;
        let accepted = passwords.knows(field) || passwords.accept(credentials);
        if accepted {
            passwords.remember(*field);
        }
        accepted
    }
}

fn begin_upload(
    service: &Service,
    target: &str,
    removals: Removals,
) -> Result<Box<UploadFile>, Status> {
    let target = Target::parse(target).map_err(|_| Status::NOT_FOUND)?;
    let file = AtomicFile::create_below(&service.root(), &target.path);
    let file = file.map_err(|error| refuse_write(service, &target.path, &error))?;
    Ok(Box::new(UploadFile::new(file, removals)))
}

fn commit_upload(service: &Service, file: UploadFile, only_new: bool) -> Status {
    let name = file.name().to_owned();
    match file.commit(only_new) {
        Ok(Committed::Created) => Status::CREATED,
        Ok(Committed::Replaced) => Status::NO_CONTENT,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            Status::PRECONDITION_FAILED
        }
        Err(error) => refuse_write(service, &name, &error),
    }
}

/// The status for a file that cannot be written. Logged, except for what the client did wrong.
pub(crate) fn refuse_write(service: &Service, path: &[u8], error: &std::io::Error) -> Status {
    let status = status_of_write(error);
    if !matches!(status, Status::CONFLICT | Status::NOT_FOUND | Status::URI_TOO_LONG) {
        service.log_unwritable(path, status, error);
    }
    status
}

fn status_of_write(error: &std::io::Error) -> Status {
    match Errno::from_io_error(error) {
        // A missing folder, or one where a file should be (RFC 4918 section 9.7.1).
        Some(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Status::CONFLICT,
        Some(Errno::NAMETOOLONG) => Status::URI_TOO_LONG,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Status::INSUFFICIENT_STORAGE,
        Some(Errno::ROFS) => Status::FORBIDDEN,
        _ => status_of(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_server::offload::{Inbox, Offload};
    use haul_server::waker::Waker;
    use std::net::IpAddr;

    const ANN: &str = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG";

    #[test]
    fn one_address_gets_its_share_of_the_queue_and_no_more() {
        let passwords = Arc::new(Passwords::parse(ANN).unwrap());
        // No thread: every job stays in the queue.
        let offload = Offload::start(&pools(false, false)).unwrap();
        let queue = offload.queue(&Inbox::new(Arc::new(Waker::new().unwrap())));
        let is_accepted = |address: Option<&str>, guess: usize| {
            let credentials = Credentials { user: "ann".into(), password: b"open".to_vec() };
            let network = address.map(|address| Network::from(address.parse::<IpAddr>().unwrap()));
            let field = blake3::hash(&guess.to_ne_bytes());
            let passwords = Arc::clone(&passwords);
            let check = PasswordCheck { passwords, credentials, field, network };
            queue.push(0, FileJob::VerifyPassword(check));
            queue.replies().is_empty()
        };
        let accepted = |addresses: &[&str]| {
            let address = |at: usize| Some(addresses[at % addresses.len()]);
            (0..20).filter(|&at| is_accepted(address(at), at)).count()
        };
        assert_eq!(accepted(&["192.0.2.1", "::ffff:192.0.2.1"]), GUESSES_PER_NETWORK_MAX);
        let network = ["2001:db8::1", "2001:db8::2"];
        assert_eq!(accepted(&network), GUESSES_PER_NETWORK_MAX, "a customer's network");
        assert_eq!(accepted(&["192.0.2.2"]), GUESSES_PER_NETWORK_MAX);
        let same = (0..100).filter(|_| is_accepted(Some("192.0.2.3"), 7)).count();
        assert_eq!(same, UNVERIFIED_PER_NETWORK_MAX, "one password on many connections");
        assert!((0..20).all(|at| is_accepted(None, at)), "a Unix socket has no address");
    }

    #[test]
    fn listings_wait_in_a_queue_of_their_own_with_a_share_for_each_network() {
        let folder = tempfile::tempdir().unwrap();
        let service = Arc::new(Service::new(&crate::config::Config::new(folder.path())).unwrap());
        let directory = Arc::new(File::open(folder.path()).unwrap());
        // No thread: every job stays in the queue.
        let offload = Offload::start(&pools(false, false)).unwrap();
        let queue = offload.queue(&Inbox::new(Arc::new(Waker::new().unwrap())));
        let accepted = |host: u8| {
            let job = || {
                FileJob::List(ListingJob {
                    service: Arc::clone(&service),
                    directory: Arc::clone(&directory),
                    target: "/".into(),
                    prefers_json: false,
                    network: Some(Network::from(IpAddr::from([192, 0, 2, host]))),
                })
            };
            assert_eq!(job().pool_index(), LISTING_POOL);
            (0..100)
                .filter(|_| {
                    queue.push(0, job());
                    queue.replies().is_empty()
                })
                .count()
        };
        for host in 0..4 {
            assert_eq!(accepted(host), UNLISTED_PER_NETWORK_MAX);
        }
        assert_eq!(accepted(4), 0, "{UNLISTED_MAX} wait");
    }
}
