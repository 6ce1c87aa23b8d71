//! The kernel's functions by address, from `/proc/kallsyms`.

use std::fs;
use std::io;

/// A function of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Function {
    start: u64,
    /// Name in the source, without the compiler's suffixes (`.isra.0`, `.cold`).
    pub name: String,
    /// Distance to the next function.
    pub size_bytes: u64,
}

/// The kernel's functions, sorted by address.
#[derive(Debug)]
pub(super) struct Symbols(Vec<Function>);

/// Maximum size of a function. The last one of the kernel or of a module has no next function,
/// which would limit its size.
const SIZE_BYTES_MAX: u64 = 64 << 10;

impl Symbols {
    /// Reads the kernel's symbol list. Fails with `PermissionDenied` if the kernel hides its
    /// addresses.
    pub(super) fn read() -> io::Result<Self> {
        let symbols = Self::parse(&fs::read_to_string("/proc/kallsyms")?);
        if symbols.0.iter().all(|function| function.start == 0) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the kernel hides its addresses (sysctl -w kernel.kptr_restrict=0, or run as root)",
            ));
        }
        Ok(symbols)
    }

    fn parse(kallsyms: &str) -> Self {
        let mut functions: Vec<Function> = kallsyms
            .lines()
            .filter_map(|line| {
                let mut fields = line.split_ascii_whitespace();
                let start = u64::from_str_radix(fields.next()?, 16).ok()?;
                let kind = fields.next()?;
                let name = fields.next()?.split('.').next()?;
                matches!(kind, "t" | "T" | "w" | "W").then(|| Function {
                    start,
                    name: name.into(),
                    size_bytes: 0,
                })
            })
            .collect();
        // If several names share an address, the first is kept.
        functions.sort_by_key(|function| function.start);
        functions.dedup_by_key(|function| function.start);
        let ends: Vec<u64> = functions.iter().skip(1).map(|next| next.start).collect();
        for (function, end) in functions.iter_mut().zip(ends) {
            function.size_bytes = (end - function.start).min(SIZE_BYTES_MAX);
        }
        Self(functions)
    }

    /// The function that contains an address.
    pub(super) fn find(&self, address: u64) -> Option<&Function> {
        let after = self.0.partition_point(|function| function.start <= address);
        let function = &self.0[after.checked_sub(1)?];
        (address - function.start < function.size_bytes.max(1)).then_some(function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_resolves_to_its_function() {
        let symbols = Symbols::parse(
            "ffffffff81000100 t second.isra.0\nffffffff81000000 T first\nffffffff81000100 t alias\n\
             ffffffff81000180 D data\nffffffff81000200 T third [module]\nnonsense\n",
        );
        let name = |address| symbols.find(address).map(|function| function.name.as_str());
        assert_eq!(name(0xffff_ffff_8100_0000), Some("first"));
        assert_eq!(name(0xffff_ffff_8100_00ff), Some("first"));
        assert_eq!(name(0xffff_ffff_8100_01ff), Some("second"));
        assert_eq!(name(0xffff_ffff_8100_0200), Some("third"));
        assert_eq!(name(0x1000), None);
        assert_eq!(symbols.find(0xffff_ffff_8100_0150).unwrap().size_bytes, 256);
    }
}
