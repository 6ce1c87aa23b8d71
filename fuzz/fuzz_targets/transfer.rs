//! Fuzzes both ends of a copy with the bytes of a hostile other end.
//!
//! No input panics, hangs, or makes a file outside the destination.
#![cfg_attr(fuzzing, no_main)]

use haul_transfer::{AcceptedPaths, DeletionMode, Delta, Options, Session, accept};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What the last byte of the input selects.
const DELTAS: [Delta; 3] = [Delta::No, Delta::Fixed, Delta::Rolling];

fn target(bytes: &[u8]) {
    let _ = accept(&mut &*bytes, &mut std::io::sink());
    let folder = tempfile::tempdir().unwrap();
    let (outer, source) = (folder.path().join("outer"), folder.path().join("source"));
    fs::create_dir(&outer).unwrap();
    let mut options = Options::default();
    // Another user's files could not be removed.
    options.preserve.owner = false;
    options.preserve.specials = false;
    options.dry_run = bytes.first().is_some_and(|first| first % 8 == 7);
    let destination = outer.join("destination");
    if bytes.get(1).is_some_and(|second| second % 2 == 1) {
        options.deletion.mode = DeletionMode::All;
    }
    options.delta = DELTAS[bytes.last().map_or(0, |last| usize::from(last % 3))];
    if options.delta != Delta::No {
        write_earlier_version(&destination);
    }
    let _ = Session::new(bytes, std::io::sink(), options.clone())
        .receive(destination.as_os_str().as_bytes(), &AcceptedPaths::All);
    let entries = fs::read_dir(&outer).unwrap();
    for entry in entries {
        assert_eq!(entry.unwrap().path(), destination, "a file outside the destination");
    }
    write_source(&source);
    let _ = Session::new(bytes, std::io::sink(), options)
        .send(&[source.as_os_str().as_bytes().to_vec()]);
}

fn write_source(source: &Path) {
    fs::create_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub/small"), "small").unwrap();
    fs::write(source.join("large"), vec![7; 200_000]).unwrap();
}

/// Writes another version of the large file to a destination.
fn write_earlier_version(destination: &Path) {
    fs::create_dir_all(destination.join("source")).unwrap();
    let mut content = vec![7; 300_000];
    content[100_000] = 8;
    fs::write(destination.join("source/large"), content).unwrap();
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_streams_keep_the_invariants() {
    let folder = tempfile::tempdir().unwrap();
    write_source(&folder.path().join("source"));
    let streams: Vec<_> = (0..3).map(|number| recorded(folder.path(), number)).collect();
    let mut state = 1u64;
    for number in 0..600 {
        let mut bytes = streams[number / 2 % 3][number % 2].clone();
        for _ in 0..2 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Most of a stream is content.
            let at = (state >> 33) as usize % bytes.len().min(400);
            bytes[at] = (state >> 20) as u8;
        }
        target(&bytes);
    }
}

/// The streams of both ends of a copy, with the number of [`DELTAS`] as the last byte.
#[cfg(test)]
fn recorded(folder: &Path, number: u8) -> [Vec<u8>; 2] {
    use std::io::{Read, Result};
    use std::os::unix::net::UnixStream;

    struct Recorder<'a>(UnixStream, &'a mut Vec<u8>);

    impl Read for Recorder<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
            let count = self.0.read(buffer)?;
            self.1.extend_from_slice(&buffer[..count]);
            Ok(count)
        }
    }

    let mut options = Options::default();
    options.delta = DELTAS[usize::from(number)];
    let path = folder.join(format!("copy{number}"));
    write_earlier_version(&path);
    let (one, other) = UnixStream::pair().unwrap();
    let [mut of_source, mut of_destination] = [Vec::new(), Vec::new()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let from = Recorder(other.try_clone().unwrap(), &mut of_source);
            Session::new(from, &other, options.clone())
                .receive(path.as_os_str().as_bytes(), &AcceptedPaths::All)
                .unwrap();
        });
        let from = Recorder(one.try_clone().unwrap(), &mut of_destination);
        let source = folder.join("source");
        Session::new(from, &one, options.clone())
            .send(&[source.as_os_str().as_bytes().to_vec()])
            .unwrap();
    });
    [of_source, of_destination].map(|stream| [stream, vec![number]].concat())
}
