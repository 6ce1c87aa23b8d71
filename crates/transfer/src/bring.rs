//! Copies this program to a host that lacks it, through the login that starts the other end.
//!
//! The command on the other host is `sh`, which gets a script on standard input. The script starts
//! the copy of this program that an earlier transfer left, or the host's haul if it speaks the same
//! version of the protocol. Otherwise the script asks for this program, keeps it in the cache
//! folder, and starts it. No argument of the command has a space, so the command means the same to
//! every login shell and to commands that start no shell, such as `docker exec -i`.

use crate::direct::Notice;
use crate::error::Error;
use std::fs::File;
use std::io::{self, Read, Write};

/// How the script begins.
const SCRIPT_BEGIN: &[u8] = b"#haul\n";
/// How the script ends. Some shells read a script from a pipe byte by byte, and begin with the
/// commands after the line with the last brace. So nothing may follow that line.
const SCRIPT_END: &[u8] = b"} #end\n";
/// The most bytes of a script: shells read a script of this size at once.
const SCRIPT_BYTES_MAX: usize = 4096;
/// The first bytes of the line by which the script asks for this program. The system and the kind
/// of CPU follow, as uname(1) names them.
const REQUEST: &[u8; 8] = b"haul?bri";
/// The most bytes of that line.
const LINE_BYTES_MAX: usize = 200;
/// What `haul receive --speaks` prints before the version of the protocol.
pub const SPEAKS: &str = "haul speaks";
/// The bytes of the hash in the name of the copy.
const HASH_BYTES: usize = 16;

/// The program of this process, and whom to tell that it was copied.
pub struct OwnProgram {
    file: File,
    bytes: u64,
    hash: String,
    notice: Notice,
}

impl OwnProgram {
    /// The program of this process (`/proc/self/exe`).
    pub fn open(notice: Notice) -> io::Result<Self> {
        let mut file = File::open("/proc/self/exe")?;
        let mut hasher = blake3::Hasher::new();
        let bytes = hasher.update_reader(&mut file)?.count();
        let hash = hasher.finalize().to_hex()[..2 * HASH_BYTES].to_owned();
        Ok(Self { file, bytes, hash, notice })
    }

    /// What `sh` on the other host does.
    pub(crate) fn script(&self, version: u32) -> Vec<u8> {
        let Self { bytes, hash, .. } = self;
        let commands = format!(
            r#"{{
v={version} n={bytes} b=haul-{hash} u=$(umask)
d=${{XDG_CACHE_HOME:-$HOME/.cache}}/haul
[ -f "$d/$b" ] && [ $(wc -c <"$d/$b") -eq $n ] &&
"$d/$b" receive --speaks $v </dev/null >/dev/null 2>&1 && exec "$d/$b" receive
[ "$(haul receive --speaks $v </dev/null 2>/dev/null)" = "{SPEAKS} $v" ] && exec haul receive
echo "haul?bring $(uname -s) $(uname -m)"
umask 077
t=$d/.$b-$(uname -n)-$$
trap 'rm -f "$t"' EXIT
trap 'exit 126' HUP INT TERM
mkdir -p "$d" && chmod 700 "$d" && head -c $n >"$t" && [ $(wc -c <"$t") -eq $n ] &&
chmod 700 "$t" && "$t" receive --speaks $v </dev/null >/dev/null && sync "$t" &&
mv -f "$t" "$d/$b" || exit 126
find "$d" -name "haul-*" -mtime +90 -exec rm -f {{}} +
find "$d" -name ".haul-*" -mtime +0 -exec rm -f {{}} +
umask $u
exec "$d/$b" receive
"#
        );
        [SCRIPT_BEGIN, commands.as_bytes(), SCRIPT_END].concat()
    }

    /// Answers the script's request, whose first bytes were read.
    pub(crate) fn bring(&self, from: &mut impl Read, to: &mut impl Write) -> Result<(), Error> {
        let machine = read_line(from)?;
        let is_same = machine
            .split_once(' ')
            .is_some_and(|(system, kind)| system == "Linux" && kind == std::env::consts::ARCH);
        if !is_same {
            return Err(Error::Unlike { there: machine, here: std::env::consts::ARCH });
        }
        let failed = Error::Connection;
        // The offset belongs to this descriptor, which the hash moved.
        let mut file = self.file.try_clone().map_err(failed)?;
        io::Seek::rewind(&mut file).map_err(failed)?;
        let sent = io::copy(&mut file.take(self.bytes), to).map_err(failed)?;
        if sent != self.bytes {
            return Err(failed(io::Error::other("the file of this program changed")));
        }
        to.flush().map_err(failed)?;
        (self.notice)(&format!(
            "the other host lacks this version of haul, so this program was copied there ({} MiB, \
             kept in its cache folder, haul)",
            self.bytes.div_ceil(1 << 20)
        ));
        Ok(())
    }
}

impl std::fmt::Debug for OwnProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnProgram").field("hash", &self.hash).finish_non_exhaustive()
    }
}

/// Reads the line of the script, whose first bytes were read: the system and the kind of CPU.
fn read_line(from: &mut impl Read) -> Result<String, Error> {
    let line = read_to(from, b"\n", LINE_BYTES_MAX)?;
    let line = String::from_utf8_lossy(&line);
    Ok(line.trim_end().strip_prefix("ng ").unwrap_or_default().to_owned())
}

/// Whether a stream begins with the request of the script.
pub fn is_request(first: &[u8]) -> bool {
    first == REQUEST
}

/// Whether a stream begins with a script. A command that sshd forces in the place of `sh` gets the
/// script.
pub fn is_script(first: &[u8]) -> bool {
    first.starts_with(SCRIPT_BEGIN)
}

/// Reads up to the end of a script, whose first bytes were read.
pub fn skip_script(from: &mut impl Read) -> Result<(), Error> {
    read_to(from, SCRIPT_END, SCRIPT_BYTES_MAX).map(drop)
}

/// Reads up to these bytes, and nothing behind them.
fn read_to(from: &mut impl Read, end: &[u8], bytes_max: usize) -> Result<Vec<u8>, Error> {
    let mut read = Vec::new();
    while !read.ends_with(end) {
        if read.len() == bytes_max {
            return Err(Error::Protocol("a line or a script without an end"));
        }
        let mut byte = [0];
        from.read_exact(&mut byte).map_err(Error::Connection)?;
        read.extend(byte);
    }
    Ok(read)
}
