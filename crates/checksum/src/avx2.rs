//! Checksum kernel for AVX2: 32 bytes at a time.
//!
//! `vpmaddwd` multiplies signed words and adds neighbours. Each word is first made signed by
//! flipping its highest bit, which subtracts 32768 from it; the subtracted amount is added again at
//! the end.

use crate::combine_sums;
use crate::portable;
use crate::store::{CACHED, NONE, STREAMED};
use std::arch::x86_64::{
    __m256i, _mm_add_epi32, _mm_cvtsi128_si32, _mm_sfence, _mm_shuffle_epi32, _mm256_add_epi32,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_set1_epi16, _mm256_setzero_si256, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

/// Bytes in a vector.
const VECTOR: usize = 32;
/// Bytes in one loop iteration: four vectors, each with a separate accumulator, so that none waits
/// for another.
const STRIDE: usize = 4 * VECTOR;
/// Bytes after which the accumulators are summed and reset: the sum of this many words of up to
/// ±2¹⁵ fits a signed 32-bit number.
const BLOCK: usize = 64 << 10;

/// Sums `bytes`; the result is not folded.
///
/// # Safety
///
/// The CPU must have AVX2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn sum(bytes: &[u8]) -> u64 {
    let whole = bytes.len() / VECTOR * VECTOR;
    // SAFETY: with `NONE` nothing is stored, so the null pointer is never used.
    unsafe { run::<NONE>(&bytes[..whole], std::ptr::null_mut()) + portable::sum(&bytes[whole..]) }
}

/// Copies `from` to `to` and sums the bytes; the result is not folded.
///
/// # Safety
///
/// The CPU must have AVX2; both slices must have the same length.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy(from: &[u8], to: &mut [u8], is_streamed: bool) -> u64 {
    // Stores across two cache lines cost twice as much, and streaming stores must be aligned.
    let head =
        if from.len() < STRIDE { 0 } else { to.as_ptr().align_offset(VECTOR).min(from.len()) };
    let whole = (from.len() - head) / VECTOR * VECTOR;
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    let first = portable::copy(from_head, to_head);
    let last = portable::copy(&from[whole..], &mut to[whole..]);
    // SAFETY: the slices of each pair have the same length, and `to` is now aligned unless it is
    // short.
    let middle = unsafe {
        if is_streamed && whole >= STRIDE {
            run::<STREAMED>(&from[..whole], to.as_mut_ptr())
        } else {
            run::<CACHED>(&from[..whole], to.as_mut_ptr())
        }
    };
    combine_sums(first, head, middle + last)
}

/// Sums whole vectors and stores them as `STORE` selects.
///
/// # Safety
///
/// The CPU must have AVX2, and `from` must be whole vectors. Unless `STORE` is `NONE`, `to` must
/// have room for `from.len()` bytes, and be aligned to a vector if `STORE` is `STREAMED`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn run<const STORE: u8>(from: &[u8], to: *mut u8) -> u64 {
    let mut total = 0;
    let mut at = 0;
    while at < from.len() {
        let end = from.len().min(at + BLOCK);
        let mut lanes = [_mm256_setzero_si256(); 4];
        // SAFETY: each vector that is loaded or stored ends at or before `end`.
        unsafe {
            let (mut source, mut target) = (from.as_ptr().add(at), to.wrapping_add(at));
            for _ in 0..(end - at) / STRIDE {
                for (index, lane) in lanes.iter_mut().enumerate() {
                    let vector = _mm256_loadu_si256(source.add(index * VECTOR).cast());
                    store::<STORE>(target.wrapping_add(index * VECTOR), vector);
                    *lane = accumulate(*lane, vector);
                }
                source = source.add(STRIDE);
                target = target.wrapping_add(STRIDE);
            }
            for _ in 0..(end - at) % STRIDE / VECTOR {
                let vector = _mm256_loadu_si256(source.cast());
                store::<STORE>(target, vector);
                lanes[0] = accumulate(lanes[0], vector);
                source = source.add(VECTOR);
                target = target.wrapping_add(VECTOR);
            }
        }
        let [one, two, three, four] = lanes;
        let lanes = _mm256_add_epi32(_mm256_add_epi32(one, two), _mm256_add_epi32(three, four));
        let four =
            _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
        let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
        let one = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)));
        // Each word was reduced by 32768; adding that back gives the exact sum, which is never
        // negative.
        total += (i64::from(one) + 32_768 * ((end - at) / 2) as i64) as u64;
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

#[target_feature(enable = "avx2")]
#[inline]
fn accumulate(lane: __m256i, vector: __m256i) -> __m256i {
    let signed = _mm256_xor_si256(vector, _mm256_set1_epi16(i16::MIN));
    _mm256_add_epi32(lane, _mm256_madd_epi16(signed, _mm256_set1_epi16(1)))
}

/// Stores one vector as `STORE` selects.
///
/// # Safety
///
/// As for [`run`], for one vector.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store<const STORE: u8>(to: *mut u8, vector: __m256i) {
    // SAFETY: the caller guarantees it.
    unsafe {
        match STORE {
            STREAMED => _mm256_stream_si256(to.cast(), vector),
            CACHED => _mm256_storeu_si256(to.cast(), vector),
            _ => {}
        }
    }
}
