//! The interposer, as `build.rs` built it.

/// The shared library, an ELF file.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libhaul_interpose.so"));

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSymbol};

    #[test]
    fn the_library_exports_the_functions_that_programs_call() {
        let file = object::File::parse(LIBRARY).unwrap();
        let exported: Vec<&str> = file
            .dynamic_symbols()
            .filter(|symbol| symbol.is_definition() && symbol.is_global())
            .filter_map(|symbol| symbol.name().ok())
            .collect();
        for name in ["write", "writev", "sendmsg", "sendfile64", "pread64", "accept4", "_exit"] {
            assert!(exported.contains(&name), "{name} is missing: {exported:?}");
        }
        // A name that is exported by mistake would replace a function of the program.
        assert!(exported.len() < 70, "{exported:?}");
    }
}
