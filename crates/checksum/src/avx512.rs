//! Checksum kernel for AVX-512 (BW and VNNI): 64 bytes at a time.
//!
//! `vpdpwssd` multiplies signed words and adds neighbours to an accumulator, in one instruction.
//! Each word is first made signed by flipping its highest bit, which subtracts 32768 from it; the
//! subtracted amount is added again at the end. The last bytes are a vector whose missing bytes are
//! zero.

use crate::combine_sums;
use crate::store::{CACHED, NONE, STREAMED};
use std::arch::x86_64::{
    __m512i, _mm_sfence, _mm512_add_epi32, _mm512_dpwssd_epi32, _mm512_loadu_si512,
    _mm512_mask_storeu_epi8, _mm512_maskz_loadu_epi8, _mm512_reduce_add_epi32, _mm512_set1_epi16,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_xor_si512,
};

/// Bytes in a vector.
const VECTOR: usize = 64;
/// Bytes in one loop iteration: four vectors, each with a separate accumulator, because the
/// instruction takes four or five cycles.
const STRIDE: usize = 4 * VECTOR;
/// Bytes after which the accumulators are summed and reset: the sum of this many words of up to
/// ±2¹⁵ fits a signed 32-bit number.
const BLOCK: usize = 64 << 10;

/// Sums `bytes`; the result is not folded.
///
/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI.
#[target_feature(enable = "avx512bw,avx512vnni")]
pub(crate) unsafe fn sum(bytes: &[u8]) -> u64 {
    // SAFETY: with `NONE` nothing is stored, so the null pointer is never used.
    unsafe { run::<NONE>(bytes, std::ptr::null_mut()) }
}

/// Copies `from` to `to` and sums the bytes; the result is not folded.
///
/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI; both slices must have the same length.
#[target_feature(enable = "avx512bw,avx512vnni")]
pub(crate) unsafe fn copy(from: &[u8], to: &mut [u8], is_streamed: bool) -> u64 {
    // Stores across two cache lines cost twice as much, and streaming stores must be aligned.
    let head =
        if from.len() < STRIDE { 0 } else { to.as_ptr().align_offset(VECTOR).min(from.len()) };
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    // SAFETY: the slices of each pair have the same length, and `to` is now aligned unless it is
    // short.
    unsafe {
        let first = run::<CACHED>(from_head, to_head.as_mut_ptr());
        let rest = if is_streamed && from.len() >= STRIDE {
            run::<STREAMED>(from, to.as_mut_ptr())
        } else {
            run::<CACHED>(from, to.as_mut_ptr())
        };
        combine_sums(first, head, rest)
    }
}

/// Sums `from` and stores it as `STORE` selects.
///
/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI. Unless `STORE` is `NONE`, `to` must have room for
/// `from.len()` bytes, and be aligned to a vector if `STORE` is `STREAMED`.
#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
unsafe fn run<const STORE: u8>(from: &[u8], to: *mut u8) -> u64 {
    let mut total = 0;
    let mut at = 0;
    while at < from.len() {
        let end = from.len().min(at + BLOCK);
        let mut lanes = [_mm512_setzero_si512(); 4];
        // SAFETY: each vector that is loaded or stored ends at or before `end`, the last by its
        // mask.
        unsafe {
            let (mut source, mut target) = (from.as_ptr().add(at), to.wrapping_add(at));
            for _ in 0..(end - at) / STRIDE {
                for (index, lane) in lanes.iter_mut().enumerate() {
                    let vector = _mm512_loadu_si512(source.add(index * VECTOR).cast());
                    store::<STORE>(target.wrapping_add(index * VECTOR), vector);
                    *lane = accumulate(*lane, vector);
                }
                source = source.add(STRIDE);
                target = target.wrapping_add(STRIDE);
            }
            let rest = (end - at) % STRIDE;
            for _ in 0..rest / VECTOR {
                let vector = _mm512_loadu_si512(source.cast());
                store::<STORE>(target, vector);
                lanes[0] = accumulate(lanes[0], vector);
                source = source.add(VECTOR);
                target = target.wrapping_add(VECTOR);
            }
            if !rest.is_multiple_of(VECTOR) {
                let mask = (1 << (rest % VECTOR)) - 1;
                let vector = _mm512_maskz_loadu_epi8(mask, source.cast());
                if STORE != NONE {
                    _mm512_mask_storeu_epi8(target.cast(), mask, vector);
                }
                lanes[1] = accumulate(lanes[1], vector);
            }
        }
        let [one, two, three, four] = lanes;
        let lanes = _mm512_add_epi32(_mm512_add_epi32(one, two), _mm512_add_epi32(three, four));
        // Each word of each vector was reduced by 32768; adding that back gives the exact sum,
        // which is never negative.
        let words = (end - at).div_ceil(VECTOR) * (VECTOR / 2);
        total += (i64::from(_mm512_reduce_add_epi32(lanes)) + 32_768 * words as i64) as u64;
        at = end;
    }
    if STORE == STREAMED {
        // Without the fence, streaming stores may become visible after later stores.
        // Later versions of Rust than the minimum have it as a safe function.
        #[allow(unused_unsafe, reason = "needed by the minimum Rust version")]
        // SAFETY: the fence needs SSE alone, and every x86-64 CPU has that.
        unsafe {
            _mm_sfence();
        }
    }
    total
}

#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
fn accumulate(lane: __m512i, vector: __m512i) -> __m512i {
    _mm512_dpwssd_epi32(
        lane,
        _mm512_xor_si512(vector, _mm512_set1_epi16(i16::MIN)),
        _mm512_set1_epi16(1),
    )
}

/// Stores one vector as `STORE` selects.
///
/// # Safety
///
/// As for [`run`], for one vector.
#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
unsafe fn store<const STORE: u8>(to: *mut u8, vector: __m512i) {
    // SAFETY: the caller guarantees it.
    unsafe {
        match STORE {
            STREAMED => _mm512_stream_si512(to.cast(), vector),
            CACHED => _mm512_storeu_si512(to.cast(), vector),
            _ => {}
        }
    }
}
