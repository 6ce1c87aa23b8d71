//! 64 bytes at a time (AVX-512 BW and VNNI).
//!
//! `vpdpwssd` multiplies signed words and adds neighbours to an accumulator, in one instruction. Each word is first made
//! signed by flipping its highest bit, which takes 32768 from it; what was taken is added again in the end. The last
//! bytes are a vector whose missing bytes are zero.

use crate::joined;
use crate::store::{CACHED, NONE, STREAMED};
use std::arch::x86_64::{
    __m512i, _mm_sfence, _mm512_add_epi32, _mm512_dpwssd_epi32, _mm512_loadu_si512,
    _mm512_mask_storeu_epi8, _mm512_maskz_loadu_epi8, _mm512_reduce_add_epi32, _mm512_set1_epi16,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_xor_si512,
};

/// Bytes of a vector.
const VECTOR: usize = 64;
/// Vectors to a turn, each with an accumulator of its own: the instruction takes four or five cycles.
const TURN: usize = 4 * VECTOR;
/// Bytes after which the accumulators are emptied: this many words of up to ±2¹⁵ fit a signed 32-bit number together.
const BLOCK: usize = 64 << 10;

/// The sum of `bytes`, not yet folded.
///
/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI.
#[target_feature(enable = "avx512bw,avx512vnni")]
pub(crate) unsafe fn sum(bytes: &[u8]) -> u64 {
    // SAFETY: nothing is stored.
    unsafe { run::<NONE>(bytes, std::ptr::null_mut()) }
}

/// The same while copying.
///
/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI; both must have one length.
#[target_feature(enable = "avx512bw,avx512vnni")]
pub(crate) unsafe fn copy(from: &[u8], to: &mut [u8], is_streamed: bool) -> u64 {
    // Stores that straddle two cache lines cost twice, and streamed ones must not.
    let head = if from.len() < TURN { 0 } else { to.as_ptr().align_offset(VECTOR).min(from.len()) };
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    // SAFETY: the lengths are the same by pairs, and `to` is aligned now unless it is short.
    unsafe {
        let first = run::<CACHED>(from_head, to_head.as_mut_ptr());
        let rest = if is_streamed && from.len() >= TURN {
            run::<STREAMED>(from, to.as_mut_ptr())
        } else {
            run::<CACHED>(from, to.as_mut_ptr())
        };
        joined(first, head, rest)
    }
}

/// # Safety
///
/// The CPU must have AVX-512 BW and VNNI. Unless `STORE` is `NONE`, `to` must have room for as much as `from`, and be
/// aligned to a vector if it is `STREAMED`.
#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
unsafe fn run<const STORE: u8>(from: &[u8], to: *mut u8) -> u64 {
    let mut total = 0;
    let mut at = 0;
    while at < from.len() {
        let end = from.len().min(at + BLOCK);
        let mut lanes = [_mm512_setzero_si512(); 4];
        // SAFETY: each vector that is loaded or stored ends at or before `end`, the last by its mask.
        unsafe {
            let (mut source, mut target) = (from.as_ptr().add(at), to.wrapping_add(at));
            for _ in 0..(end - at) / TURN {
                for (index, lane) in lanes.iter_mut().enumerate() {
                    let vector = _mm512_loadu_si512(source.add(index * VECTOR).cast());
                    store::<STORE>(target.wrapping_add(index * VECTOR), vector);
                    *lane = added(*lane, vector);
                }
                source = source.add(TURN);
                target = target.wrapping_add(TURN);
            }
            let rest = (end - at) % TURN;
            for _ in 0..rest / VECTOR {
                let vector = _mm512_loadu_si512(source.cast());
                store::<STORE>(target, vector);
                lanes[0] = added(lanes[0], vector);
                source = source.add(VECTOR);
                target = target.wrapping_add(VECTOR);
            }
            if !rest.is_multiple_of(VECTOR) {
                let mask = (1 << (rest % VECTOR)) - 1;
                let vector = _mm512_maskz_loadu_epi8(mask, source.cast());
                if STORE != NONE {
                    _mm512_mask_storeu_epi8(target.cast(), mask, vector);
                }
                lanes[1] = added(lanes[1], vector);
            }
        }
        let [one, two, three, four] = lanes;
        let lanes = _mm512_add_epi32(_mm512_add_epi32(one, two), _mm512_add_epi32(three, four));
        // Each vector's words gave up 32768; so exact, and never below 0.
        let words = (end - at).div_ceil(VECTOR) * (VECTOR / 2);
        total += (i64::from(_mm512_reduce_add_epi32(lanes)) + 32_768 * words as i64) as u64;
        at = end;
    }
    if STORE == STREAMED {
        // Streamed stores may become visible after later ones otherwise.
        _mm_sfence();
    }
    total
}

#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
fn added(lane: __m512i, vector: __m512i) -> __m512i {
    _mm512_dpwssd_epi32(
        lane,
        _mm512_xor_si512(vector, _mm512_set1_epi16(i16::MIN)),
        _mm512_set1_epi16(1),
    )
}

/// # Safety
///
/// As [`run`], for one vector.
#[target_feature(enable = "avx512bw,avx512vnni")]
#[inline]
unsafe fn store<const STORE: u8>(to: *mut u8, vector: __m512i) {
    // SAFETY: the caller's.
    unsafe {
        match STORE {
            STREAMED => _mm512_stream_si512(to.cast(), vector),
            CACHED => _mm512_storeu_si512(to.cast(), vector),
            _ => {}
        }
    }
}
