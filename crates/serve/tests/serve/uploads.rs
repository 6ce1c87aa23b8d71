//! Uploads: files that clients write with PUT.

use crate::common::{Client, Service, large_content, wait_until};
use std::fs;
use std::io::Read;
use std::net::Shutdown;

/// Starts a service that accepts uploads of at most 8 MiB.
fn start() -> Service {
    Service::start(
        |root| fs::create_dir(root.join("sub")).unwrap(),
        |config| config.put_bytes_max = Some(8 << 20),
    )
}

/// The sorted names of the entries of a directory of the service.
fn names(service: &Service, path: &str) -> Vec<String> {
    let entries = fs::read_dir(service.path(path)).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Uploads `body` and returns the status of the response.
fn put(client: &mut Client, target: &str, fields: &str, body: &[u8]) -> u16 {
    client.send(&format!(
        "PUT {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n{fields}\r\n",
        body.len()
    ));
    client.try_send(body).unwrap();
    client.response(false).unwrap().status
}

#[test]
fn put_creates_and_replaces_files_on_one_connection() {
    let service = start();
    let mut client = service.connect();
    let large = large_content();
    for (target, body, status) in [
        ("/sub/new", &b"first"[..], 201),
        ("/sub/new", b"second", 204),
        ("/sub/large", &large, 201),
        ("/sub/empty", b"", 201),
        ("/sub/a%20b", b"space", 201),
    ] {
        assert_eq!(put(&mut client, target, "", body), status, "{target}");
        client.send(&format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert!(client.response(false).unwrap().body == body, "{target}");
    }
    assert_eq!(
        names(&service, "sub"),
        ["a b", "empty", "large", "new"],
        "no temporary file is left"
    );
}

#[test]
fn a_replaced_file_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt;
    let service = start();
    let path = service.path("secret");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(put(&mut service.connect(), "/secret", "", b"new"), 204);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

/// A chunk that is too large is refused by its size, before its data.
#[test]
fn a_chunk_beyond_the_limit_is_refused_at_once() {
    let service = start();
    let mut client = service.connect();
    client.send("PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    client.send("FFFFFFFFFFFFFFFF\r\n");
    assert_eq!(client.response(false).unwrap().status, 413);
}

#[test]
fn chunked_pipelined_and_100_continue_uploads_are_accepted() {
    let service = start();
    let mut client = service.connect();
    // A chunked body, directly followed by the next requests: in one piece, then byte by byte.
    let text = "PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n\
                5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nT: x\r\n\r\n\
                GET /a HTTP/1.1\r\nHost: h\r\n\r\n\
                PUT /b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc\
                GET /b HTTP/1.1\r\nHost: h\r\n\r\n";
    for piece_bytes in [text.len(), 1] {
        for piece in text.as_bytes().chunks(piece_bytes) {
            client.try_send(piece).unwrap();
        }
        let responses: Vec<_> = (0..4).map(|_| client.response(false).unwrap()).collect();
        let created = if piece_bytes == 1 { 204 } else { 201 };
        assert_eq!((responses[0].status, responses[2].status), (created, created));
        assert_eq!(
            (responses[1].text().as_str(), responses[3].text().as_str()),
            ("hello world", "abc")
        );
    }
    client.send("PUT /c HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.response(false).unwrap().status, 100);
    client.send("xyz");
    assert_eq!(client.response(false).unwrap().status, 201);
    assert_eq!(fs::read(service.path("c")).unwrap(), b"xyz");
}

#[test]
fn an_upload_that_is_not_allowed_is_refused_before_its_body() {
    let service = start();
    for (target, fields, status) in [
        ("/sub/", "Content-Length: 1", 409),
        ("/sub", "Content-Length: 1", 409),
        ("/none/a", "Content-Length: 1", 409),
        ("/ten.txt/a", "Content-Length: 1", 409),
        ("/.hidden", "Content-Length: 1", 404),
        ("/../a", "Content-Length: 1", 400),
        ("/a", "X: y", 411),
        ("/a", "Content-Length: 99999999", 413),
        ("/a", "Content-Length: 1\r\nContent-Range: bytes 0-0/10", 400),
        ("/a", "Content-Length: 1\r\nContent-Encoding: gzip", 415),
        ("/ten.txt", "Content-Length: 1\r\nIf-None-Match: *", 412),
        ("/ten.txt", "Content-Length: 1\r\nIf-Match: \"other\"", 412),
        ("/none", "Content-Length: 1\r\nIf-Match: *", 412),
        ("/a", "Content-Length: 1\r\nExpect: wonders", 417),
    ] {
        let response = service.request("PUT", target, &format!("{fields}\r\n"));
        assert_eq!(response.status, status, "{target} {fields}");
    }
    let long_name = format!("/{}", "x".repeat(300));
    assert_eq!(service.request("PUT", &long_name, "Content-Length: 1\r\n").status, 414);
    let mut client = service.connect();
    client.send("PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n");
    assert_eq!(client.response(false).unwrap().status, 400);
    let mut client = service.connect();
    client.send("PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..10 {
        let sent = client.try_send(format!("100000\r\n{}\r\n", "x".repeat(1 << 20)).as_bytes());
        if sent.is_err() {
            break;
        }
    }
    assert_eq!(client.response(false).unwrap().status, 413, "the chunks exceed the limit");
    // A thread removes the unfinished file, after the response.
    wait_until("only complete files are left", || {
        names(&service, ".") == ["empty", "large.bin", "sub", "ten.txt"]
    });
    assert_eq!(fs::read(service.path("ten.txt")).unwrap(), b"0123456789");
    let service = service.wait_for_tags();
    let etag = service.get("/ten.txt").field("etag").unwrap().to_owned();
    assert_eq!(
        put(&mut service.connect(), "/ten.txt", &format!("If-Match: {etag}\r\n"), b"changed"),
        204
    );
    assert_eq!(service.get("/ten.txt").text(), "changed");
    // `If-None-Match` of another tag than the file's is true, so the file is replaced.
    assert_eq!(
        put(&mut service.connect(), "/ten.txt", "If-None-Match: \"other\"\r\n", b"again"),
        204
    );
    assert_eq!(service.get("/ten.txt").text(), "again");
}

#[test]
fn an_incomplete_body_leaves_no_file() {
    let service = start();
    for sent_bytes in [0, 1, 100_000] {
        let mut client = service.connect();
        client.send("PUT /ten.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n");
        client.try_send(&vec![b'x'; sent_bytes]).unwrap();
        client.stream.shutdown(Shutdown::Write).unwrap();
        let mut received = Vec::new();
        let _ = client.stream.read_to_end(&mut received);
        assert!(received.is_empty(), "{}", String::from_utf8_lossy(&received));
    }
    wait_until("the temporary files are removed", || names(&service, ".").len() <= 4);
    assert_eq!(service.get("/ten.txt").text(), "0123456789");
}

#[test]
fn a_body_that_stalls_times_out() {
    let service = Service::start(
        |_| {},
        |config| {
            config.put_bytes_max = Some(1 << 20);
            config.limits.send_timeout = std::time::Duration::from_secs(1);
        },
    );
    let mut client = service.connect();
    client.send("PUT /ten.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc");
    assert_eq!(client.response(false).unwrap().status, 408);
    assert!(client.is_closed());
    // A thread removes the unfinished file, after the response.
    wait_until("only complete files are left", || {
        names(&service, ".") == ["empty", "large.bin", "ten.txt"]
    });
    assert_eq!(service.get("/ten.txt").text(), "0123456789");
}
