//! Fuzzes the HTTP parsers of the file server.
//!
//! No input panics. The end of a request does not depend on the bytes after it, its path stays
//! inside the root, and its ranges stay inside the file. A chunked body decodes to the same bytes
//! however it is split.
#![cfg_attr(fuzzing, no_main)]

use haul_http::chunked::{Chunked, Piece};
use haul_http::conditional::{Validators, evaluate, range_applies};
use haul_http::credentials::Credentials;
use haul_http::encoding::{Coding, choose};
use haul_http::range::{SelectedRanges, parse as parse_range};
use haul_http::request::{Parsed, parse};
use haul_http::target::{Target, encode_path};
use std::time::SystemTime;

const HEAD_BYTES_MAX: usize = 1024;
const FILE_BYTES: u64 = 1000;

fn target(bytes: &[u8]) {
    check_head(bytes);
    let (whole, halves) = (decode_chunked(&[bytes]), bytes.split_at(bytes.len() / 2));
    assert_eq!(whole, decode_chunked(&[halves.0, halves.1]));
}

fn check_head(bytes: &[u8]) {
    let Parsed::Whole(request, head_bytes) = parse(bytes, HEAD_BYTES_MAX) else { return };
    assert!(head_bytes <= bytes.len().min(HEAD_BYTES_MAX));
    // Bytes after a head do not change how it is parsed.
    let again = parse(&bytes[..head_bytes], HEAD_BYTES_MAX);
    assert!(matches!(again, Parsed::Whole(_, same) if same == head_bytes));
    let validators = Validators { etag: Some("\"a\"".into()), modified: Some(784_111_777) };
    let _ = evaluate(request.method, &request.fields, Some(&validators));
    let _ = range_applies(&request.fields, &validators, SystemTime::now());
    let _ = choose(&request.fields.accept_encoding, Coding::ALL.into_iter());
    let _ = request.prefers_json();
    if let Some(credentials) = request.fields.authorization.and_then(Credentials::parse) {
        assert!(!credentials.user.contains(':') && !credentials.user.contains(char::is_control));
    }
    if let Some(field) = request.fields.range {
        let ranges = match parse_range(field, FILE_BYTES) {
            SelectedRanges::One(range) => vec![range],
            SelectedRanges::Many(ranges) => ranges,
            SelectedRanges::Everything | SelectedRanges::Unsatisfiable => vec![],
        };
        assert!(ranges.iter().all(|range| range.start < range.end && range.end <= FILE_BYTES));
    }
    if let Ok(target) = Target::parse(request.target) {
        let segments = || target.path.split(|&byte| byte == b'/');
        assert!(!segments().any(|segment| matches!(segment, b"." | b"..") || segment.contains(&0)));
        assert!(target.path.is_empty() || segments().all(|segment| !segment.is_empty()));
        let encoded = encode_path(&target.path);
        assert!(!encoded.starts_with("//"), "a path with two slashes at the start names a host");
        assert_eq!(Target::parse(&(encoded + "/")).unwrap().path, target.path);
    }
}

/// Decodes the chunked body at the start of the concatenated pieces.
///
/// Returns the body and its encoded length, or `None` if the body is malformed or incomplete.
fn decode_chunked(pieces: &[&[u8]]) -> Option<(Vec<u8>, usize)> {
    let (mut chunked, mut body, mut consumed) = (Chunked::default(), Vec::new(), 0);
    for piece in pieces {
        let mut at = 0;
        loop {
            match chunked.next(piece, at) {
                Piece::Data(range) => {
                    assert!(range.start < range.end && range.end <= piece.len());
                    body.extend_from_slice(&piece[range.clone()]);
                    at = range.end;
                }
                Piece::More => break,
                Piece::End(end) => return Some((body, consumed + end)),
                Piece::Malformed => return None,
            }
        }
        consumed += piece.len();
    }
    None
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_requests_keep_the_invariants() {
    let request = b"GET /a/../%2e/b%20?x HTTP/1.1\r\nHost: h\r\nRange: bytes=0-4,-5\r\n\
        If-Range: \"a\"\r\nAuthorization: Basic YTpi\r\nIf-None-Match: W/\"b\", \"a\"\r\n\
        Accept-Encoding: br;q=0.5, gzip\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = b"5;x\r\nhello\r\nA\r\n0123456789\r\n0\r\nT: x\r\n\r\n";
    let mut state = 1u64;
    for valid in [&request[..], chunks] {
        target(valid);
        for _ in 0..5000 {
            let mut bytes = valid.to_vec();
            for _ in 0..3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 20) as u8;
            }
            target(&bytes);
        }
    }
}
