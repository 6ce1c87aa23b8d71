//! The entry point of fuzz targets.

/// Defines the entry point of a target, a function of bytes: the fuzzer's with `cargo fuzz`,
/// otherwise a `main` that reads the bytes from standard input, to repeat what the fuzzer found.
#[macro_export]
macro_rules! fuzz {
    ($target:ident) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $target(bytes));

        #[cfg(not(fuzzing))]
        fn main() -> std::io::Result<()> {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut std::io::stdin(), &mut bytes)?;
            $target(&bytes);
            Ok(())
        }
    };
}
