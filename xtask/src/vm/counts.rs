//! `cargo xtask vm --counts`: what sending a MiB takes in a kernel, in instructions and in bytes.
//!
//! The guest runs a kernel of Debian and sends by each method. A plugin of qemu counts what the
//! emulated CPU executes. The counts are not times, but they do not depend on what else the machine
//! does: bytes repeat within a quarter of a byte for each byte sent. The bytes that string
//! instructions load are the copies.

mod guest;

pub(super) use guest::count_all;

use super::kernel::Kernel;
use super::{VmError, step};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin in C, because qemu loads a shared library.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/vm/counts/plugin.c");
/// Begins a line of the guest that names a row. Its fields are separated by tabs.
const ROW: &str = "haul count: ";
/// The field of a row that could not be counted, before the reason.
const REFUSED: &str = "refused";

/// The plugin, and the file of its counts.
pub(super) struct Plugin {
    library: PathBuf,
    counts: PathBuf,
}

impl Plugin {
    /// Compiles the plugin into a folder.
    pub fn build(folder: &Path) -> Result<Self, VmError> {
        let help = Command::new("qemu-system-x86_64").arg("-help").output();
        let help = help.map_err(|error| VmError::Missing(format!("qemu-system-x86 ({error})")))?;
        if !String::from_utf8_lossy(&help.stdout).contains("\n-plugin ") {
            return Err(VmError::Kernel(
                "this qemu does not load plugins (Debian's qemu does): --counts is not possible"
                    .into(),
            ));
        }
        let library = folder.join("counts.so");
        let mut compiler = Command::new("cc");
        compiler.args([
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
        ]);
        let status = compiler.arg(&library).arg(SOURCE).status();
        let status = status.map_err(|error| VmError::Missing(format!("cc ({error})")))?;
        if !status.success() {
            return Err(VmError::Kernel(format!("cc does not compile {SOURCE}")));
        }
        Ok(Self { library, counts: folder.join("counts") })
    }

    /// Adds the plugin to the command that boots the guest, with one CPU.
    pub fn load_into(&self, qemu: &mut Command) {
        let plugin = format!("{},counts={}", self.library.display(), self.counts.display());
        qemu.args(["-smp", "1", "-plugin", &plugin]);
    }

    /// Prints the counts of the rows that the guest named.
    pub fn print_table(&self, kernel: &Kernel, lines: &[String]) -> Result<(), VmError> {
        let counts = fs::read_to_string(&self.counts).map_err(step("reading the counts"))?;
        let rows = table(lines, &counts)?;
        let zeroing = match kernel.zeroes_new_pages() {
            Some(true) => "fills new pages with zeros",
            Some(false) => "does not fill new pages with zeros",
            None => "may fill new pages with zeros",
        };
        println!("Linux {}, which {zeroing}. Emulated: counts, not times.", kernel.release);
        println!(
            "1000 instructions for each MiB, without string instructions, and bytes for each byte:"
        );
        println!("{}", line(["", "pages", "instructions", "", "loaded", "", "stored", ""]));
        println!("{}", line(["", "lent", "kernel", "user", "all", "string", "all", "string"]));
        for row in &rows {
            match row {
                Row::Counted(cells) => println!("{}", line(cells.each_ref().map(String::as_str))),
                Row::Refused(name, reason) => println!("{name:<22} {reason}"),
            }
        }
        Ok(())
    }
}

/// A row of the table.
#[derive(Debug)]
enum Row {
    /// The cells of the line.
    Counted([String; 8]),
    /// The name, and the reason why the row was not counted.
    Refused(String, String),
}

fn line(
    [name, lent, kernel, user, loaded, string_loaded, stored, string_stored]: [&str; 8],
) -> String {
    format!(
        "{name:<22} {lent:>6} {kernel:>13} {user:>6} {loaded:>9} {string_loaded:>7} {stored:>9} \
         {string_stored:>7}"
    )
}

/// The rows of the guest with the counts of the plugin, which are in the same order.
fn table(lines: &[String], counts: &str) -> Result<Vec<Row>, VmError> {
    let mut counts = counts.lines();
    let mut rows = Vec::new();
    for row in lines.iter().filter_map(|line| Some(line.split_once(ROW)?.1)) {
        let damaged = || VmError::Guest(format!("the guest's line {row:?} is damaged"));
        let mut fields = row.split('\t');
        let [name, bytes, lent] = std::array::from_fn(|_| fields.next());
        let (Some(name), Some(bytes), Some(lent)) = (name, bytes, lent) else {
            return Err(damaged());
        };
        if bytes == REFUSED {
            rows.push(Row::Refused(name.into(), lent.into()));
            continue;
        }
        let bytes: f64 = bytes.parse().map_err(|_| damaged())?;
        let line = counts.next().unwrap_or_default();
        let numbers: Vec<f64> = line.split(' ').map_while(|field| field.parse().ok()).collect();
        let &[kernel, user, loaded, stored, string_loaded, string_stored] = numbers.as_slice()
        else {
            return Err(VmError::Guest(format!("the plugin's counts of {name} are missing")));
        };
        let for_each_mib =
            |count: f64| format!("{:.0}", count * f64::from(1 << 20) / bytes / 1000.0);
        let for_each_byte = |count: f64| format!("{:.2}", count / bytes);
        rows.push(Row::Counted([
            name.into(),
            lent.into(),
            for_each_mib(kernel),
            for_each_mib(user),
            for_each_byte(loaded),
            for_each_byte(string_loaded),
            for_each_byte(stored),
            for_each_byte(string_stored),
        ]));
    }
    if rows.is_empty() || counts.next().is_some() {
        return Err(VmError::Guest("the guest and the plugin do not agree on the rows".into()));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_counts_are_joined_in_order() {
        let lines = ["x", "haul count: a\t1048576\t0/16", "haul count: b\trefused\tno", "y"];
        let lines = lines.map(str::to_owned);
        let rows = table(&lines, "2000 1000 1048576 2097152 524288 0\n").unwrap();
        let [Row::Counted(cells), Row::Refused(name, reason)] = rows.as_slice() else {
            panic!("{rows:?}");
        };
        assert_eq!(*cells, ["a", "0/16", "2", "1", "1.00", "0.50", "2.00", "0.00"]);
        assert_eq!((name.as_str(), reason.as_str()), ("b", "no"));
        assert!(table(&lines, "").is_err(), "counts are missing");
        assert!(table(&lines, "1 1 1 1 1 1\n1 1 1 1 1 1\n").is_err(), "a row is missing");
    }
}
