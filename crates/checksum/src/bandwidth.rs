//! Memory read bandwidth: reads memory as fast as this CPU can, as a reference for kernels that do
//! more.

/// Reads every byte once; the result depends on all of them.
///
/// Uses loads of 64 bytes if the CPU has AVX-512, else the code that the compiler makes of a loop
/// over words.
pub fn read(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU feature was detected just above.
        return unsafe { read_avx512(bytes) };
    }
    read_words(bytes)
}

/// Reads every byte once, in loads of 64 bytes.
///
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
            // SAFETY: the array is as long as the load.
            *lane = _mm512_xor_si512(*lane, unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) });
        }
    }
    lanes.iter().fold(read_words(rest), |all, &lane| all | _mm512_reduce_or_epi64(lane) as u64)
}

fn read_words(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let tail = rest.iter().fold(0, |all, &byte| all ^ u64::from(byte));
    words.iter().fold(tail, |all, word| all ^ u64::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_changes_the_result() {
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
