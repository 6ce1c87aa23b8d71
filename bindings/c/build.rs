//! The name by which the dynamic linker finds the library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhaul.so.0");
    // A thread of haul may keep loans after `dlclose`, so the code stays.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
