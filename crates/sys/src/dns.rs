//! Questions to the machine's name servers, answered with all that they state (`res_search(3)`).
//!
//! Needs glibc 2.34 or musl.

use std::ffi::{CStr, c_char, c_int, c_uchar};
use std::io;

/// The longest answer: DNS messages over TCP state their length in 16 bits.
const ANSWER_BYTES_MAX: usize = u16::MAX as usize;

/// `ns_c_in` of `<arpa/nameser.h>`: the internet.
const CLASS: c_int = 1;

/// `HOST_NOT_FOUND`, `TRY_AGAIN` and `NO_DATA` of `<netdb.h>`.
const HOST_NOT_FOUND: c_int = 1;
const TRY_AGAIN: c_int = 2;
const NO_DATA: c_int = 4;

/// What is asked about a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordType {
    /// IPv4 addresses.
    A = 1,
    /// IPv6 addresses.
    Aaaa = 28,
}

unsafe extern "C" {
    fn res_search(
        name: *const c_char,
        class: c_int,
        record_type: c_int,
        answer: *mut c_uchar,
        answer_bytes: c_int,
    ) -> c_int;
    fn __h_errno_location() -> *mut c_int;
}

/// Asks the name servers of `/etc/resolv.conf` for the records of a name, and returns their answer
/// (RFC 1035 section 4); `None` without a such record. Blocks, for 10 s and longer if no name
/// server answers.
///
/// glibc completes the name by the search domains, as `getaddrinfo` does; musl does not. Neither
/// looks into `/etc/hosts`.
pub fn search(name: &CStr, record_type: RecordType) -> io::Result<Option<Vec<u8>>> {
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    // SAFETY: the name ends in 0, and at most `ANSWER_BYTES_MAX` bytes of the answer are written.
    // The state of the resolver is the thread's own.
    let length = unsafe {
        res_search(
            name.as_ptr(),
            CLASS,
            record_type as c_int,
            answer.as_mut_ptr(),
            ANSWER_BYTES_MAX as c_int,
        )
    };
    if let Ok(length) = usize::try_from(length) {
        // The length of an answer that was cut off is the length of the whole answer.
        answer.truncate(length);
        return Ok(Some(answer));
    }
    // SAFETY: the location is the thread's own, and is valid as long as the thread.
    match unsafe { *__h_errno_location() } {
        HOST_NOT_FOUND | NO_DATA => Ok(None),
        TRY_AGAIN => Err(io::Error::new(io::ErrorKind::TimedOut, "no name server has answered")),
        _ => Err(io::Error::other("the name servers could not be asked, or refuse to answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No name server is asked for it. The C library decides whether that is a failure.
    #[test]
    fn an_invalid_name_has_no_records() {
        let name = std::ffi::CString::new("a".repeat(64)).unwrap();
        for record_type in [RecordType::A, RecordType::Aaaa] {
            assert!(!matches!(search(&name, record_type), Ok(Some(_))));
        }
    }
}
