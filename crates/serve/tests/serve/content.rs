//! The file that a request target maps to, and the fields of its response.

use crate::common::{Client, Service, large_content, wait_until};
use haul_serve::{AccessLog, LogFormat, Symlinks};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

#[test]
fn files_outside_the_root_and_hidden_files_are_not_served() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let secret = outside.path().join("secret");
    let fill = |root: &std::path::PathBuf| {
        fs::create_dir(root.join("sub")).unwrap();
        fs::write(root.join(".hidden"), "hidden").unwrap();
        fs::create_dir(root.join(".well-known")).unwrap();
        fs::write(root.join(".well-known/token"), "token").unwrap();
        symlink(&secret, root.join("out")).unwrap();
        symlink("ten.txt", root.join("in")).unwrap();
    };
    let service = Service::start(fill, |_| {});
    for target in [
        "/../secret",
        "/sub/../../secret",
        "/%2e%2e/secret",
        "/%2e%2e%2fsecret",
        "/sub/..%2f..%2fsecret",
        "/..%00/secret",
        "/out",
        "//etc/passwd",
        "/.hidden",
        "/sub/%2e/%2ehidden",
        "/sub/../.hidden",
        "/nothing",
        "/ten.txt/",
        "/ten.txt/more",
        "/sub/",
    ] {
        assert_eq!(service.get(target).status, 404, "{target}");
    }
    assert_eq!(service.get("/in").text(), "0123456789");
    assert_eq!(service.get("/sub/../%74en.txt?query").text(), "0123456789");
    assert_eq!(service.get("/.well-known/token").text(), "token");
    let strict = Service::start(fill, |config| {
        config.content.symlinks = Symlinks::Never;
        config.content.hidden = true;
    });
    assert_eq!(strict.get("/in").status, 404);
    assert_eq!(strict.get("/.hidden").text(), "hidden");
    let loose = Service::start(fill, |config| config.content.symlinks = Symlinks::Anywhere);
    assert_eq!(loose.get("/out").text(), "secret");
}

#[test]
fn a_directory_gets_its_index_or_a_listing_and_a_trailing_slash() {
    let fill = |root: &std::path::PathBuf| {
        fs::create_dir_all(root.join("with/deep")).unwrap();
        fs::write(root.join("with/index.html"), "<p>index").unwrap();
        fs::create_dir(root.join("with out")).unwrap();
        fs::write(root.join("with out/<b>&"), "x").unwrap();
    };
    let service = Service::start(fill, |config| config.content.listing = true);
    let index = service.get("/with/");
    assert_eq!(
        (index.text().as_str(), index.field("content-type")),
        ("<p>index", Some("text/html; charset=utf-8"))
    );
    let redirect = service.get("/with%20out?sort=size");
    assert_eq!(
        (redirect.status, redirect.field("location")),
        (301, Some("/with%20out/?sort=size"))
    );
    assert_eq!(
        service.get("//with").field("location"),
        Some("/with/"),
        "a leading `//` must not redirect to another host"
    );
    let page = service.get("/with%20out/");
    assert_eq!(page.status, 200);
    assert!(
        page.text().contains("&lt;b&gt;&amp;") && !page.text().contains("<b>"),
        "{}",
        page.text()
    );
    assert!(page.field("content-security-policy").unwrap().contains("default-src 'none'"));
    let json = service.request("GET", "/with%20out/", "Accept: application/json\r\n");
    assert_eq!(json.field("content-type"), Some("application/json"));
    let entries: serde_json::Value = serde_json::from_slice(&json.body).unwrap();
    assert_eq!((&entries[0]["name"], &entries[0]["size"]), (&"<b>&".into(), &1.into()));
    for (accept, content_type) in [
        ("text/html;q=0.1, APPLICATION/JSON", "application/json"),
        ("application/json;q=0, text/html", "text/html; charset=utf-8"),
    ] {
        let listing = service.request("GET", "/with%20out/", &format!("Accept: {accept}\r\n"));
        assert_eq!(listing.field("content-type"), Some(content_type), "{accept}");
    }
    let head = service.request("HEAD", "/with%20out/", "");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert!(
        Service::start(fill, |_| {}).get("/with%20out/").status == 404,
        "listings are off by default"
    );
}

#[test]
fn precompressed_files_are_sent_to_clients_that_accept_them() {
    let service = Service::start(
        |root| {
            fs::write(root.join("a.css"), "plain").unwrap();
            fs::write(root.join("a.css.gz"), "gzipped").unwrap();
            fs::write(root.join("a.css.br"), "brotli").unwrap();
            fs::write(root.join("ten.txt.gz"), "old").unwrap();
            let old = fs::File::options().write(true).open(root.join("ten.txt.gz")).unwrap();
            old.set_modified(std::time::UNIX_EPOCH).unwrap();
        },
        |config| config.content.precompressed = true,
    )
    .wait_for_tags();
    let get_accepting = |codings: &str| {
        service.request("GET", "/a.css", &format!("Accept-Encoding: {codings}\r\n"))
    };
    let mut tags = Vec::new();
    for (codings, body, coding) in [
        ("gzip, br", "brotli", Some("br")),
        ("gzip", "gzipped", Some("gzip")),
        ("gzip;q=0", "plain", None),
        ("deflate", "plain", None),
    ] {
        let response = get_accepting(codings);
        assert_eq!(
            (response.text().as_str(), response.field("content-encoding")),
            (body, coding),
            "{codings}"
        );
        assert_eq!(response.field("content-type"), Some("text/css; charset=utf-8"));
        assert_eq!(response.field("vary"), Some("Accept-Encoding"));
        tags.push(response.field("etag").unwrap().to_owned());
    }
    assert!(
        tags[0] != tags[1] && tags[1] != tags[2],
        "each representation has its own tag: {tags:?}"
    );
    let ten = service.request("GET", "/ten.txt", "Accept-Encoding: gzip\r\n");
    assert_eq!(ten.text(), "0123456789", "a compressed file older than its original is not sent");
}

#[test]
fn configured_fields_and_error_pages_are_sent() {
    let service = Service::start(
        |root| {
            fs::create_dir(root.join("assets")).unwrap();
            fs::write(root.join("assets/app.js"), "js").unwrap();
            fs::write(root.join("404.html"), "<h1>not found").unwrap();
        },
        |config| {
            config.fields.headers.push(("X-Frame-Options".into(), "DENY".into()));
            config
                .fields
                .cache_control
                .push(("assets/**".into(), "max-age=31536000, immutable".into()));
            config.fields.cache_control.push(("*".into(), "no-cache".into()));
            config.fields.cors.push("https://app.example".into());
            config.content.error_pages.push((404, "/404.html".into()));
            config.content.error_pages.push((416, "/404.html".into()));
        },
    );
    let asset = service.request("GET", "/assets/app.js", "Origin: https://app.example\r\n");
    assert_eq!(asset.field("cache-control"), Some("max-age=31536000, immutable"));
    assert_eq!(asset.field("x-frame-options"), Some("DENY"));
    assert_eq!(asset.field("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(asset.field("vary"), Some("Origin"));
    let other_origin = service.request("GET", "/ten.txt", "Origin: https://evil.example\r\n");
    assert_eq!(
        (other_origin.field("access-control-allow-origin"), other_origin.field("cache-control")),
        (None, Some("no-cache"))
    );
    let preflight = service.request(
        "OPTIONS",
        "/ten.txt",
        "Origin: https://app.example\r\nAccess-Control-Request-Method: GET\r\n",
    );
    assert_eq!(preflight.status, 204);
    assert!(preflight.field("access-control-allow-methods").unwrap().contains("GET"));
    let missing = service.get("/nothing");
    assert_eq!((missing.status, missing.text().as_str()), (404, "<h1>not found"));
    assert_eq!(missing.field("content-type"), Some("text/html; charset=utf-8"));
    let unsatisfiable = service.request("GET", "/ten.txt", "Range: bytes=10-\r\n");
    assert_eq!((unsatisfiable.status, unsatisfiable.text().as_str()), (416, "<h1>not found"));
    assert_eq!(unsatisfiable.field("content-range"), Some("bytes */10"));
}

#[test]
fn the_fallback_page_answers_every_target_without_a_file() {
    let service = Service::start(
        |root| fs::write(root.join("app.html"), "app").unwrap(),
        |config| config.content.fallback = Some("/app.html".into()),
    );
    for target in ["/", "/deep/link", "/.hidden"] {
        let response = service.get(target);
        assert_eq!((response.status, response.text().as_str()), (200, "app"), "{target}");
    }
    assert_eq!(service.get("/ten.txt").text(), "0123456789");
}

/// zchunk, the format of dnf's metadata, asks for so many ranges.
#[test]
fn a_request_for_255_ranges_gets_the_ranges() {
    let service = Service::start_default().with_old_files();
    for (count, status) in [(255, 206), (301, 200)] {
        let ranges: Vec<_> =
            (0..count).map(|at| format!("{}-{}", 400 * at, 400 * at + 9)).collect();
        let fields = format!("Range: bytes={}\r\n", ranges.join(","));
        let response = service.request("GET", "/large.bin", &fields);
        assert_eq!(response.status, status, "{count}");
    }
}

#[test]
fn scripts_of_other_origins_may_read_whether_parts_can_be_asked_for() {
    let service = Service::start(|_| {}, |config| config.fields.cors = vec!["*".into()]);
    let response = service.request("HEAD", "/ten.txt", "Origin: https://viewer.example\r\n");
    let exposed = response.field("access-control-expose-headers").unwrap();
    assert!(exposed.split(", ").any(|name| name == "Accept-Ranges"), "{exposed}");
}

/// A client that revalidates by date would keep the old release for ever.
#[test]
fn a_date_that_says_nothing_is_neither_sent_nor_believed() {
    let service = Service::start(
        |root| {
            fs::write(root.join("app.js"), "old").unwrap();
            let file = fs::File::options().write(true).open(root.join("app.js")).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        },
        |_| {},
    );
    assert_eq!(service.get("/app.js").field("last-modified"), None);
    let date = "Thu, 01 Jan 1970 00:00:01 GMT";
    for (field, status) in [
        ("If-Modified-Since", 200),
        ("If-Unmodified-Since", 200),
        ("Range: bytes=0-0\r\nIf-Range", 200),
    ] {
        let response = service.request("GET", "/app.js", &format!("{field}: {date}\r\n"));
        assert_eq!(response.status, status, "{field}");
    }
}

/// `ln -sfn releases/2 current`, and a build that makes its output directory again.
#[test]
fn a_served_directory_that_was_replaced_is_followed() {
    let mut link = None;
    let service = Service::start(
        |root| {
            for release in ["r1", "r2"] {
                fs::create_dir(root.join(release)).unwrap();
                fs::write(root.join(release).join("index.html"), release).unwrap();
            }
            symlink("r1", root.join("current")).unwrap();
            link = Some(root.join("current"));
        },
        |config| config.root = config.root.join("current"),
    );
    let link = link.unwrap();
    let serves = |text: &str| wait_until("the text is served", || service.get("/").text() == text);
    serves("r1");
    symlink("r2", link.with_extension("new")).unwrap();
    fs::rename(link.with_extension("new"), &link).unwrap();
    serves("r2");
    fs::remove_file(&link).unwrap();
    fs::create_dir(&link).unwrap();
    fs::write(link.join("index.html"), "made again").unwrap();
    serves("made again");
}

/// A browser would take the page for the script, and a cache would keep the page under its name.
#[test]
fn the_fallback_page_does_not_answer_for_a_missing_script() {
    let service = Service::start(
        |root| fs::write(root.join("app.html"), "app").unwrap(),
        |config| config.content.fallback = Some("/app.html".into()),
    );
    let get = |target: &str, accept: &str| {
        service.request("GET", target, &format!("Accept: {accept}\r\n"))
    };
    for (target, accept, status) in [
        ("/assets/old.js", "*/*", 404),
        ("/assets/old.js", "text/html;q=0, */*", 404),
        ("/old.png?v=2", "image/avif, image/*", 404),
        ("/users/john.doe", "text/html,application/xhtml+xml,*/*;q=0.8", 200),
        ("/users/john", "*/*", 200),
        ("/v1.2/", "*/*", 200),
    ] {
        let response = get(target, accept);
        assert_eq!(response.status, status, "{target} {accept}");
        let varies = response.field("vary") == Some("Accept");
        assert_eq!(varies, target.contains('.') && !target.ends_with('/'), "{target}");
    }
}

#[test]
fn a_modification_date_in_the_future_is_not_sent() {
    let service = Service::start(
        |root| {
            for (name, seconds) in [("future", 4_000_000_000u64), ("past", 1_000_000_000)] {
                fs::write(root.join(name), name).unwrap();
                let file = fs::File::options().write(true).open(root.join(name)).unwrap();
                file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
            }
        },
        |_| {},
    )
    .wait_for_tags();
    assert_eq!(service.get("/future").field("last-modified"), None, "the date is in the future");
    assert_eq!(service.get("/past").field("last-modified"), Some("Sun, 09 Sep 2001 01:46:40 GMT"));
}

#[test]
fn a_deleted_file_is_closed() {
    let service = Service::start_default().wait_for_tags();
    let path = service.path("large.bin").display().to_string();
    // The link of a deleted file is its path and ` (deleted)` (proc(5)).
    let is_open = || {
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|link| link.display().to_string().starts_with(&path))
    };
    assert!(service.get("/large.bin").body == large_content());
    assert!(is_open(), "the descriptor is cached");
    fs::remove_file(service.path("large.bin")).unwrap();
    assert_eq!(service.get("/large.bin").status, 404);
    assert!(!is_open());
}

#[test]
fn a_log_pipe_that_is_not_read_delays_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    // The FIFO is open for reading and writing, but is never read.
    let _fifo = fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut service = Service::start(
        |_| {},
        |config| {
            config.access_log = Some(AccessLog::new(Some(path.clone()), LogFormat::Combined));
        },
    );
    let mut client = service.connect();
    let agent = "x".repeat(2000);
    for _ in 0..1000 {
        client.send(&format!("GET /ten.txt HTTP/1.1\r\nHost: h\r\nUser-Agent: {agent}\r\n\r\n"));
        assert_eq!(client.response(false).unwrap().status, 200);
    }
    let started = std::time::Instant::now();
    // The thread waits for the pipe, so the log stays in the old file.
    let errors = service.handle.reload().unwrap_err();
    assert!(errors[0].to_string().contains("reload again"), "{errors:?}");
    drop(client);
    service.stop();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "the service stops although its log cannot be written: {:?}",
        started.elapsed()
    );
}

#[test]
fn requests_are_logged_and_the_log_can_be_rotated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let mut service = Service::start(
        |_| {},
        |config| {
            config.access_log = Some(AccessLog::new(Some(path.clone()), LogFormat::Json));
            config.put_bytes_max = Some(1 << 20);
            config.limits.drain_timeout = Duration::from_secs(1);
        },
    );
    service.request("GET", "/ten.txt", "User-Agent: a\"b\r\n");
    service.get("/nothing");
    service.get("/large.bin");
    service.request("POST", "/twice", "Content-Length: 1\r\nContent-Length: 2\r\n");
    let mut aborted = service.connect();
    aborted.send("PUT /half HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc");
    aborted.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(aborted.is_closed());
    let lines = |path: &std::path::Path| -> Vec<serde_json::Value> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    wait_until("five lines in the log", || lines(&path).len() >= 5);
    let rotated = directory.path().join("access.log.1");
    fs::rename(&path, &rotated).unwrap();
    service.handle.reload().unwrap();
    assert_eq!(service.get("/empty").status, 200);
    // A response that the drain timeout cuts off is logged with the bytes that were sent.
    let mut stalled = service.connect();
    stalled.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    // 1000 bytes are more than the response's head: its body is being sent.
    wait_until("the stalled client has 1000 bytes", || {
        stalled.stream.peek(&mut [0; 1000]).unwrap() == 1000
    });
    service.stop();
    let (old, new) = (lines(&rotated), lines(&path));
    assert_eq!((&old[0]["target"], &old[0]["user_agent"]), (&"/ten.txt".into(), &"a\"b".into()));
    assert_eq!(
        (&old[1]["status"], &old[2]["body_bytes"]),
        (&404.into(), &large_content().len().into())
    );
    assert_eq!(
        (&old[3]["status"], &old[3]["refused_line"]),
        (&400.into(), &"POST /twice HTTP/1.1".into())
    );
    assert_eq!((&old[4]["status"], &old[4]["target"]), (&400.into(), &"/half".into()));
    assert_eq!((old.len(), new.len(), &new[0]["target"]), (5, 2, &"/empty".into()));
    let sent = new[1]["body_bytes"].as_u64().unwrap();
    assert!(
        new[1]["status"] == 200 && sent > 0 && sent < large_content().len() as u64,
        "{:?}",
        new[1]
    );
}

/// Starts a service whose directory `many` has 12,000 files.
fn service_with_a_large_directory() -> Service {
    Service::start(
        |root| {
            fs::create_dir(root.join("many")).unwrap();
            for number in 0..12_000 {
                fs::write(root.join(format!("many/file-{number:05}")), "").unwrap();
            }
        },
        |config| config.content.listing = true,
    )
}

#[test]
fn a_large_listing_has_a_next_page() {
    let service = service_with_a_large_directory();
    let (mut target, mut names, mut pages) = ("/many/?format=json".to_owned(), Vec::new(), 0);
    loop {
        let response = service.get(&target);
        let entries: Vec<serde_json::Value> = serde_json::from_slice(&response.body).unwrap();
        assert!(entries.len() <= 10_000);
        names.extend(entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()));
        pages += 1;
        let Some(link) = response.field("link") else { break };
        let query = link.strip_prefix("<?").and_then(|rest| rest.strip_suffix(">; rel=\"next\""));
        target = format!("/many/?{}", query.unwrap());
    }
    let expected: Vec<_> = (0..12_000).map(|number| format!("file-{number:05}")).collect();
    assert_eq!((pages, names), (2, expected));
    let page = service.get("/many/").text();
    assert!(page.contains("rel=\"next\"") && page.contains("page: 10000"));
}

/// Clients that do not read their listing share it, and do not delay other requests.
#[test]
fn unread_listings_share_their_memory_and_delay_nothing() {
    const CLIENTS: usize = 300;
    /// One listing has some 1.5 MB.
    const GROWTH_BYTES_MAX: u64 = 150 << 20;
    let service = service_with_a_large_directory();
    assert_eq!(service.get("/many/").status, 200);
    let before = resident_bytes();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut client = service.connect();
            client.send("GET /many/ HTTP/1.1\r\nHost: h\r\n\r\n");
            client
        })
        .collect();
    // A response has begun for most of them; some may have been refused.
    let has_begun = |client: &Client| client.stream.peek(&mut [0]).is_ok_and(|count| count == 1);
    wait_until("every response began", || clients.iter().all(has_begun));
    assert_eq!(service.get("/nothing").status, 404);
    assert_eq!(service.get("/ten.txt").status, 200);
    let growth = resident_bytes().saturating_sub(before);
    assert!(growth < GROWTH_BYTES_MAX, "{CLIENTS} listings take {growth} bytes");
}

/// The memory of this process, which runs the service.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}
