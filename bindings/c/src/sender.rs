//! `haul_sender`: bytes, files and loans.

use crate::arguments::{bytes, clear, duplicate, file_part, handle};
use crate::error::Failure;
use crate::guard;
use crate::loan::{LentMemory, Release};
use haul_library::{
    Buffer, Error, LoanLimits, LoanOutcome, MethodChoice, SendMethod, SendSettings, Sender,
};
use std::ffi::{CStr, c_char, c_int, c_short, c_void};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::ptr;
use std::time::Duration;

/// A sender of C.
pub struct HaulSender(Sender<OwnedFd>);

/// `haul_settings` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HaulSettings {
    size: usize,
    loans_max: usize,
    loan_bytes_max: usize,
    method: *const c_char,
}

const MORE: c_int = 1;
const ABORT: c_int = 1;

/// Whether the bytes wait for bytes that follow.
fn is_more(flags: c_int) -> Result<bool, Error> {
    match flags {
        0 => Ok(false),
        MORE => Ok(true),
        _ => Err(Error::InvalidInput("a flag is unknown")),
    }
}

/// `haul_settings_init_sized` of the header.
///
/// # Safety
///
/// `settings` must be null or point at `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_settings_init_sized(settings: *mut HaulSettings, size: usize) {
    let limits = LoanLimits::default();
    let defaults = HaulSettings {
        size,
        loans_max: limits.loans_max,
        loan_bytes_max: limits.bytes_max,
        method: ptr::null(),
    };
    if settings.is_null() {
        return;
    }
    // The program may have another version of the header, so only its bytes are written.
    let known = size.min(size_of::<HaulSettings>());
    // SAFETY: the caller promises `size` bytes.
    unsafe {
        ptr::write_bytes(settings.cast::<u8>(), 0, size);
        let bytes = (&raw const defaults).cast::<u8>();
        ptr::copy_nonoverlapping(bytes, settings.cast::<u8>(), known);
    }
}

/// # Safety
///
/// `settings` must be null or point at initialised settings.
unsafe fn read_settings(settings: *const HaulSettings) -> Result<SendSettings, Error> {
    if settings.is_null() {
        return Ok(SendSettings::default());
    }
    // SAFETY: the caller promises a valid pointer. Every version of the settings begins with size.
    if unsafe { (&raw const (*settings).size).read() } != size_of::<HaulSettings>() {
        let problem = "the settings were not set by haul_settings_init, or by another haul.h";
        return Err(Error::InvalidInput(problem));
    }
    // SAFETY: the settings have the size of this version.
    let settings = unsafe { &*settings };
    let limits = LoanLimits::default()
        .with_loans_max(settings.loans_max)
        .with_bytes_max(settings.loan_bytes_max);
    let choice = SendSettings::default().with_limits(limits);
    if settings.method.is_null() {
        return Ok(choice);
    }
    // SAFETY: the caller promises a string that ends with a zero.
    let name = unsafe { CStr::from_ptr(settings.method) }.to_string_lossy();
    let method: SendMethod =
        name.parse().map_err(|_| Error::InvalidInput("the method is unknown"))?;
    Ok(choice.with_choice(MethodChoice::Method(method)))
}

/// `haul_sender_new` of the header.
///
/// # Safety
///
/// The pointers must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_sender_new(
    socket: c_int,
    settings: *const HaulSettings,
    sender: *mut *mut HaulSender,
) -> c_int {
    guard::call(|| {
        // SAFETY: the caller promises valid pointers.
        let settings = unsafe {
            clear(sender)?;
            read_settings(settings)?
        };
        let handle = Box::new(HaulSender(Sender::with_settings(duplicate(socket)?, settings)?));
        // SAFETY: the pointer is valid.
        unsafe { sender.write(Box::into_raw(handle)) };
        Ok::<_, Failure>(0)
    })
}

/// `haul_send` of the header.
///
/// # Safety
///
/// `sender` must be a handle, and `data` must point at `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_send(
    sender: *mut HaulSender,
    data: *const c_void,
    length: usize,
    flags: c_int,
) -> isize {
    guard::call(|| {
        // SAFETY: the caller promises a handle and the bytes.
        let (HaulSender(sender), bytes) = unsafe { (handle(sender)?, bytes(data, length)?) };
        if is_more(flags)? { sender.send_more(&[IoSlice::new(bytes)]) } else { sender.send(bytes) }
    })
}

/// `haul_sendv` of the header.
///
/// # Safety
///
/// `sender` must be a handle, and `parts` must point at `count` valid parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_sendv(
    sender: *mut HaulSender,
    parts: *const libc::iovec,
    count: c_int,
    flags: c_int,
) -> isize {
    guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulSender(sender) = unsafe { handle(sender) }?;
        let count = usize::try_from(count).map_err(|_| Error::InvalidInput("count is negative"))?;
        if parts.is_null() && count > 0 {
            return Err(Error::InvalidInput("parts is NULL"));
        }
        // The kernel takes at most `IOV_MAX` parts in one call.
        let count = count.min(1024);
        let mut slices = Vec::with_capacity(count);
        for index in 0..count {
            // SAFETY: the caller promises `count` valid parts.
            let bytes = unsafe {
                let part = &*parts.add(index);
                bytes(part.iov_base, part.iov_len)?
            };
            slices.push(IoSlice::new(bytes));
        }
        if is_more(flags)? { sender.send_more(&slices) } else { sender.send_vectored(&slices) }
    })
}

/// `haul_send_file` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_send_file(
    sender: *mut HaulSender,
    file: c_int,
    offset: u64,
    length: usize,
) -> isize {
    guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulSender(sender) = unsafe { handle(sender) }?;
        // SAFETY: the file is used during this call only.
        let (file, range) = unsafe { file_part(file, offset, length) }?;
        sender.send_file(file, range)
    })
}

/// `haul_lend` of the header.
///
/// # Safety
///
/// `sender` must be a handle. `data` must point at `length` bytes that stay unchanged until
/// `release` is called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_lend(
    sender: *mut HaulSender,
    data: *const c_void,
    length: usize,
    release: Option<Release>,
    context: *mut c_void,
) -> i64 {
    guard::call(|| {
        // SAFETY: the caller promises a handle and the bytes.
        let HaulSender(sender) = unsafe {
            bytes(data, length)?;
            handle(sender)?
        };
        // SAFETY: the caller promises that the memory stays.
        let memory = unsafe { LentMemory::new(data.cast(), length, release, context) };
        match sender.lend(Buffer::owned(memory)) {
            Ok(id) => Ok(id.number()),
            Err(refused) => {
                if let Ok(memory) = refused.buffer.into_owner::<LentMemory>() {
                    memory.refuse();
                }
                Err(refused.error)
            }
        }
    })
}

/// `haul_reclaim` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_reclaim(sender: *mut HaulSender) -> c_int {
    let mut all_returned = Vec::new();
    let count = guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulSender(sender) = unsafe { handle(sender) }?;
        all_returned.extend(sender.reclaim()?);
        Ok::<_, Failure>(all_returned.len())
    });
    // Outside of the guard, so that a release function has the signals of the program. Nothing of
    // the sender is borrowed, so a release function may call haul with this sender.
    for returned in all_returned {
        if let Ok(memory) = returned.buffer.into_owner::<LentMemory>() {
            let outcome = i32::from(returned.outcome != LoanOutcome::ZeroCopied);
            memory.release(returned.sent_bytes, outcome);
        }
    }
    count
}

/// `haul_flush` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_flush(sender: *mut HaulSender) -> c_int {
    // SAFETY: the caller promises a handle.
    guard::call(|| unsafe { handle(sender) }?.0.flush().map(|()| 0))
}

/// `haul_sender_wants` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_sender_wants(sender: *const HaulSender) -> c_short {
    guard::call(|| {
        // SAFETY: the caller promises a handle.
        let HaulSender(sender) = unsafe { handle(sender.cast_mut()) }?;
        Ok::<_, Failure>(sender.wants().poll_events())
    })
}

/// `haul_on_error_event` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_on_error_event(sender: *mut HaulSender) -> c_int {
    // SAFETY: the caller promises a handle.
    guard::call(|| unsafe { handle(sender) }?.0.on_error_event().map(|()| 0))
}

/// `haul_wait_for_completions` of the header.
///
/// # Safety
///
/// `sender` must be a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_wait_for_completions(
    sender: *mut HaulSender,
    timeout_ms: c_int,
) -> c_int {
    let timeout = u64::try_from(timeout_ms).map_or(Duration::MAX, Duration::from_millis);
    // SAFETY: the caller promises a handle.
    guard::call(|| unsafe { handle(sender) }?.0.wait_for_completions(timeout))
}

/// `haul_sender_free` of the header.
///
/// # Safety
///
/// `sender` must be null or a handle, which is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn haul_sender_free(sender: *mut HaulSender, how: c_int) {
    guard::run(|| {
        if sender.is_null() {
            return;
        }
        // SAFETY: the caller promises a handle, which `haul_sender_new` made from a box.
        let HaulSender(sender) = *unsafe { Box::from_raw(sender) };
        if how == ABORT {
            sender.abort();
        }
    });
}
