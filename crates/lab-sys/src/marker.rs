//! Marks for an emulator: instructions without effect that a plugin of qemu recognizes
//! (`xtask/src/vm/counts/plugin.c`). Everywhere else they do nothing.
//!
//! A mark is `nopl` with the displacement `hau` and a number. Intel reserves this instruction as a
//! no-op (Software Developer's Manual, volume 2, NOP), so no program depends on its displacement.

/// What a mark tells the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Count from here.
    Begin,
    /// Count until here.
    End,
    /// Report what was counted, and start again at zero.
    Report,
    /// Stop, and start again at zero without a report.
    Reset,
}

/// Executes a mark. On other processors than x86-64 nothing happens.
#[inline]
pub fn mark(mark: Mark) {
    match mark {
        Mark::Begin => nop::<1>(),
        Mark::End => nop::<2>(),
        Mark::Report => nop::<3>(),
        Mark::Reset => nop::<4>(),
    }
}

/// `nopl` with the displacement `hau` and a number.
#[inline]
fn nop<const NUMBER: u8>() {
    // SAFETY: the instruction is a no-op, which changes neither registers nor flags. The compiler
    // may assume that it accesses memory, so memory accesses stay on their side of the mark.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            ".byte 0x0f, 0x1f, 0x84, 0x00, 0x68, 0x61, 0x75, {number}",
            number = const NUMBER,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_have_no_effect() {
        let mut sum = 0;
        for number in 0..10 {
            mark(Mark::Begin);
            sum += number;
            mark(Mark::End);
        }
        mark(Mark::Report);
        mark(Mark::Reset);
        assert_eq!(sum, 45);
    }
}
