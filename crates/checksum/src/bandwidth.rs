//! Reading memory as fast as this CPU can, to compare what does more with.

/// Reads every byte once, in loads of 64 bytes where the CPU has AVX-512, else in what the compiler makes of words; the
/// result depends on all of them.
pub fn read(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has just been asked.
        return unsafe { read_avx512(bytes) };
    }
    read_plainly(bytes)
}

/// # Safety
///
/// The CPU must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn read_avx512(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::{
        _mm512_loadu_si512, _mm512_reduce_or_epi64, _mm512_setzero_si512, _mm512_xor_si512,
    };
    let (blocks, rest) = bytes.as_chunks::<512>();
    let mut lanes = [_mm512_setzero_si512(); 8];
    for block in blocks {
        for (lane, vector) in lanes.iter_mut().zip(block.as_chunks::<64>().0) {
            // SAFETY: the array is as long as what is loaded.
            *lane = _mm512_xor_si512(*lane, unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) });
        }
    }
    lanes.iter().fold(read_plainly(rest), |all, &lane| all | _mm512_reduce_or_epi64(lane) as u64)
}

fn read_plainly(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let tail = rest.iter().fold(0, |all, &byte| all ^ u64::from(byte));
    words.iter().fold(tail, |all, word| all ^ u64::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_counts() {
        for len in [0, 1, 255, 256, 1500] {
            let mut bytes = vec![0; len];
            for at in 0..len {
                bytes[at] = 1;
                assert_ne!(super::read(&bytes), 0, "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
