//! Exchanges a text among the ranks of a job through PMIx, the interface between the processes of a
//! job and their launcher: `mpirun` of Open MPI, and `srun --mpi=pmix`.
//!
//! The library `libpmix.so.2` is loaded at run time, because most hosts lack the library, and
//! because hosts with a launcher have the version that fits the launcher.

mod abi;

use abi::{Data, Info, Proc, Value};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::ManuallyDrop;
use std::time::Duration;

/// The library, by the version of its interface.
const LIBRARY: &str = "libpmix.so.2";
/// The key of the text.
const KEY: &CStr = c"haul.announcement";
/// The most bytes of the text of a rank.
pub const TEXT_BYTES_MAX: usize = 64 << 10;

/// Why the ranks cannot exchange texts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library cannot be loaded, so the ranks need another way.
    #[error("{LIBRARY} cannot be loaded: {0}")]
    Load(String),
    /// A call of the library failed.
    #[error("{call}: {reason}")]
    Call {
        /// The name of the function.
        call: &'static str,
        /// What the library states.
        reason: String,
    },
    /// A text that is too long, or has a zero byte.
    #[error("a text that PMIx cannot carry")]
    Text,
    /// The launcher's number of this rank differs from the environment.
    #[error("PMIx states that this is rank {0}")]
    Rank(u32),
}

/// Gives the text of this rank to all ranks. Returns the texts of all ranks, in order.
///
/// All ranks of the job must call this once. The call waits for the last rank, for `time` if the
/// launcher has a clock.
pub fn exchange(rank: u32, size: u32, own: &str, time: Duration) -> Result<Vec<String>, Error> {
    let own = CString::new(own).map_err(|_| Error::Text)?;
    if own.count_bytes() > TEXT_BYTES_MAX {
        return Err(Error::Text);
    }
    // SAFETY: the call runs the constructors of the launcher's library, which every MPI program of
    // the job loads.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| load(&error))?;
    // The library stays loaded, because threads and handlers of the library may outlive a client.
    let library = ManuallyDrop::new(library);
    let functions = Functions::of(&library)?;
    let client = Client::start(&functions)?;
    if client.own.rank != rank {
        return Err(Error::Rank(client.own.rank));
    }
    client.put(&own)?;
    client.fence(time)?;
    let texts = (0..size).map(|rank| client.get(rank)).collect();
    client.end()?;
    texts
}

fn load(error: &libloading::Error) -> Error {
    Error::Load(error.to_string())
}

/// The functions of the library.
struct Functions {
    init: abi::Init,
    put: abi::Put,
    commit: abi::Commit,
    fence: abi::Fence,
    get: abi::Get,
    finalize: abi::Finalize,
    error_string: abi::ErrorString,
}

impl Functions {
    fn of(library: &Library) -> Result<Self, Error> {
        fn function<F: Copy>(library: &Library, name: &CStr) -> Result<F, Error> {
            // SAFETY: each caller gives the type that the library's header declares for the name.
            // The library stays loaded.
            let symbol = unsafe { library.get::<F>(name) };
            symbol.map(|symbol| *symbol).map_err(|error| load(&error))
        }
        Ok(Self {
            init: function(library, c"PMIx_Init")?,
            put: function(library, c"PMIx_Put")?,
            commit: function(library, c"PMIx_Commit")?,
            fence: function(library, c"PMIx_Fence")?,
            get: function(library, c"PMIx_Get")?,
            finalize: function(library, c"PMIx_Finalize")?,
            error_string: function(library, c"PMIx_Error_string")?,
        })
    }

    /// The error of a call that did not succeed.
    fn check(&self, call: &'static str, status: c_int) -> Result<(), Error> {
        if status == abi::SUCCESS {
            return Ok(());
        }
        // SAFETY: the function returns a static string or null.
        let text = unsafe {
            let text = (self.error_string)(status);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let reason = text.unwrap_or_else(|| format!("status {status}"));
        Err(Error::Call { call, reason })
    }
}

/// A connection to the launcher, which ends when the client is dropped.
struct Client<'f> {
    functions: &'f Functions,
    /// This rank, as the launcher states it.
    own: Proc,
    is_open: bool,
}

impl<'f> Client<'f> {
    fn start(functions: &'f Functions) -> Result<Self, Error> {
        let mut own = Proc { namespace: [0; abi::NAMESPACE_BYTES], rank: 0 };
        // SAFETY: the library writes to `own`, and an empty list of options may be null.
        let status = unsafe { (functions.init)(&raw mut own, std::ptr::null(), 0) };
        functions.check("PMIx_Init", status)?;
        Ok(Self { functions, own, is_open: true })
    }

    /// Makes the text of this rank known to the launcher.
    fn put(&self, text: &CString) -> Result<(), Error> {
        let value = Value { kind: abi::STRING, data: Data { string: text.as_ptr() } };
        // SAFETY: the library copies the value, which lives until the call returns.
        let status = unsafe { (self.functions.put)(abi::GLOBAL, KEY.as_ptr(), &raw const value) };
        self.functions.check("PMIx_Put", status)?;
        // SAFETY: the client is open.
        self.functions.check("PMIx_Commit", unsafe { (self.functions.commit)() })
    }

    /// Waits for all ranks, and collects what the ranks put.
    fn fence(&self, time: Duration) -> Result<(), Error> {
        let seconds = c_int::try_from(time.as_secs()).unwrap_or(c_int::MAX);
        let options = [
            info(c"pmix.collect", Value { kind: abi::BOOL, data: Data { flag: true } }),
            info(c"pmix.timeout", Value { kind: abi::INT, data: Data { number: seconds } }),
        ];
        // SAFETY: null stands for all ranks of the job, and the options live until the call
        // returns.
        let status =
            unsafe { (self.functions.fence)(std::ptr::null(), 0, options.as_ptr(), options.len()) };
        self.functions.check("PMIx_Fence", status)
    }

    /// The text of a rank.
    fn get(&self, rank: u32) -> Result<String, Error> {
        let of = Proc { rank, ..self.own };
        let mut value = std::ptr::null_mut::<Value>();
        // SAFETY: the library sets `value` to a value that stays until this process frees it, which
        // it does not: the header frees values by a macro.
        let status = unsafe {
            (self.functions.get)(&raw const of, KEY.as_ptr(), std::ptr::null(), 0, &raw mut value)
        };
        self.functions.check("PMIx_Get", status)?;
        // SAFETY: the call succeeded, so the value is valid unless it is null.
        let value = unsafe { value.as_ref() }.filter(|value| value.kind == abi::STRING);
        let value = value.ok_or(Error::Text)?;
        // SAFETY: a value of this kind has a pointer to a string with a zero at its end, or null.
        let text = unsafe {
            let text = value.data.string;
            (!text.is_null()).then(|| CStr::from_ptr(text))
        };
        let text = text.filter(|text| text.count_bytes() <= TEXT_BYTES_MAX);
        text.and_then(|text| text.to_str().ok()).map(ToOwned::to_owned).ok_or(Error::Text)
    }

    /// Ends the connection, so that the launcher does not take the end of this process for a
    /// failure.
    fn end(mut self) -> Result<(), Error> {
        self.is_open = false;
        // SAFETY: the client is open, and an empty list of options may be null.
        let status = unsafe { (self.functions.finalize)(std::ptr::null(), 0) };
        self.functions.check("PMIx_Finalize", status)
    }
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // SAFETY: as in `end`.
            unsafe { (self.functions.finalize)(std::ptr::null(), 0) };
        }
    }
}

/// An option.
fn info(key: &CStr, value: Value) -> Info {
    let mut info = Info { key: [0; abi::KEY_BYTES], flags: 0, value };
    for (to, from) in info.key.iter_mut().zip(key.to_bytes()) {
        *to = *from as c_char;
    }
    info
}
