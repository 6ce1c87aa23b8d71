//! The part of the interface of `libpmix.so.2` (PMIx 2 to 5) that this crate calls.
//!
//! Source: `pmix.h` and `pmix_common.h` of PMIx 4.2.2. The layout of these types is the same since
//! PMIx 2.0.

use std::ffi::{c_char, c_int};

/// The bytes of the name of a job, with the zero at the end.
pub const NAMESPACE_BYTES: usize = 256;
/// The bytes of a key, with the zero at the end.
pub const KEY_BYTES: usize = 512;
/// `PMIX_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `PMIX_GLOBAL`: all ranks get the value.
pub const GLOBAL: u8 = 3;
/// `PMIX_BOOL`.
pub const BOOL: u16 = 1;
/// `PMIX_STRING`.
pub const STRING: u16 = 3;
/// `PMIX_INT`.
pub const INT: u16 = 6;

/// `pmix_proc_t`: a rank.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Proc {
    pub namespace: [c_char; NAMESPACE_BYTES],
    pub rank: u32,
}

/// The data of a value, whose largest part has three words.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Data {
    pub flag: bool,
    pub number: c_int,
    pub string: *const c_char,
    pub words: [u64; 3],
}

/// `pmix_value_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Value {
    pub kind: u16,
    pub data: Data,
}

/// `pmix_info_t`: an option of a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Info {
    pub key: [c_char; KEY_BYTES],
    pub flags: u32,
    pub value: Value,
}

pub type Init = unsafe extern "C" fn(*mut Proc, *const Info, usize) -> c_int;
pub type Put = unsafe extern "C" fn(u8, *const c_char, *const Value) -> c_int;
pub type Commit = unsafe extern "C" fn() -> c_int;
pub type Fence = unsafe extern "C" fn(*const Proc, usize, *const Info, usize) -> c_int;
pub type Get =
    unsafe extern "C" fn(*const Proc, *const c_char, *const Info, usize, *mut *mut Value) -> c_int;
pub type Finalize = unsafe extern "C" fn(*const Info, usize) -> c_int;
pub type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// As a C compiler lays the types of `pmix_common.h` out on 64-bit Linux.
    #[test]
    fn types_have_the_layout_of_the_header() {
        assert_eq!((size_of::<Proc>(), offset_of!(Proc, rank)), (260, 256));
        assert_eq!((size_of::<Value>(), offset_of!(Value, data)), (32, 8));
        assert_eq!((size_of::<Info>(), offset_of!(Info, flags)), (552, 512));
        assert_eq!(offset_of!(Info, value), 520);
    }
}
