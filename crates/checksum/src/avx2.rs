//! 32 bytes at a time (AVX2).
//!
//! `vpmaddwd` multiplies signed words and adds neighbours, so each word is first made signed by flipping its highest bit,
//! which takes 32768 from it; what was taken is added again in the end.

use crate::joined;
use crate::portable;
use crate::store::{CACHED, NONE, STREAMED};
use std::arch::x86_64::{
    __m256i, _mm_add_epi32, _mm_cvtsi128_si32, _mm_sfence, _mm_shuffle_epi32, _mm256_add_epi32,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_set1_epi16, _mm256_setzero_si256, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

/// Bytes of a vector.
const VECTOR: usize = 32;
/// Vectors to a turn, each with an accumulator of its own so that none waits for another.
const TURN: usize = 4 * VECTOR;
/// Bytes after which the accumulators are emptied: this many words of up to ±2¹⁵ fit a signed 32-bit number together.
const BLOCK: usize = 64 << 10;

/// The sum of `bytes`, not yet folded.
///
/// # Safety
///
/// The CPU must have AVX2.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn sum(bytes: &[u8]) -> u64 {
    let whole = bytes.len() / VECTOR * VECTOR;
    // SAFETY: nothing is stored.
    unsafe { run::<NONE>(&bytes[..whole], std::ptr::null_mut()) + portable::sum(&bytes[whole..]) }
}

/// The same while copying.
///
/// # Safety
///
/// The CPU must have AVX2; both must have one length.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn copy(from: &[u8], to: &mut [u8], is_streamed: bool) -> u64 {
    // Stores that straddle two cache lines cost twice, and streamed ones must not.
    let head = if from.len() < TURN { 0 } else { to.as_ptr().align_offset(VECTOR).min(from.len()) };
    let whole = (from.len() - head) / VECTOR * VECTOR;
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    let first = portable::copy(from_head, to_head);
    let last = portable::copy(&from[whole..], &mut to[whole..]);
    // SAFETY: the lengths are the same by pairs, and `to` is aligned now unless it is short.
    let middle = unsafe {
        if is_streamed && whole >= TURN {
            run::<STREAMED>(&from[..whole], to.as_mut_ptr())
        } else {
            run::<CACHED>(&from[..whole], to.as_mut_ptr())
        }
    };
    joined(first, head, middle + last)
}

/// # Safety
///
/// The CPU must have AVX2, and `from` be whole vectors. Unless `STORE` is `NONE`, `to` must have room for as much, and be
/// aligned to a vector if it is `STREAMED`.
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
            for _ in 0..(end - at) / TURN {
                for (index, lane) in lanes.iter_mut().enumerate() {
                    let vector = _mm256_loadu_si256(source.add(index * VECTOR).cast());
                    store::<STORE>(target.wrapping_add(index * VECTOR), vector);
                    *lane = added(*lane, vector);
                }
                source = source.add(TURN);
                target = target.wrapping_add(TURN);
            }
            for _ in 0..(end - at) % TURN / VECTOR {
                let vector = _mm256_loadu_si256(source.cast());
                store::<STORE>(target, vector);
                lanes[0] = added(lanes[0], vector);
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
        // Each word gave up 32768; so exact, and never below 0.
        total += (i64::from(one) + 32_768 * ((end - at) / 2) as i64) as u64;
        at = end;
    }
    if STORE == STREAMED {
        // Streamed stores may become visible after later ones otherwise.
        _mm_sfence();
    }
    total
}

#[target_feature(enable = "avx2")]
#[inline]
fn added(lane: __m256i, vector: __m256i) -> __m256i {
    let signed = _mm256_xor_si256(vector, _mm256_set1_epi16(i16::MIN));
    _mm256_add_epi32(lane, _mm256_madd_epi16(signed, _mm256_set1_epi16(1)))
}

/// # Safety
///
/// As [`run`], for one vector.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store<const STORE: u8>(to: *mut u8, vector: __m256i) {
    // SAFETY: the caller's.
    unsafe {
        match STORE {
            STREAMED => _mm256_stream_si256(to.cast(), vector),
            CACHED => _mm256_storeu_si256(to.cast(), vector),
            _ => {}
        }
    }
}
