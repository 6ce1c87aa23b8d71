//! Which file a target stands for, and what is said about it.

use crate::common::{Service, eventually, large};
use haul_serve::{AccessLog, LogFormat, Symlinks};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

#[test]
fn nothing_outside_is_served() {
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
fn a_folder_is_its_index_or_a_listing_and_ends_in_a_slash() {
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
    assert_eq!(service.get("//with").field("location"), Some("/with/"), "never another host");
    let page = service.get("/with%20out/");
    assert_eq!(page.status, 200);
    assert!(
        page.text().contains("&lt;b&gt;&amp;") && !page.text().contains("<b>"),
        "{}",
        page.text()
    );
    assert!(page.field("content-security-policy").unwrap().contains("default-src 'none'"));
    let json = service.ask("GET", "/with%20out/", "Accept: application/json\r\n");
    assert_eq!(json.field("content-type"), Some("application/json"));
    let entries: serde_json::Value = serde_json::from_slice(&json.body).unwrap();
    assert_eq!((&entries[0]["name"], &entries[0]["size"]), (&"<b>&".into(), &1.into()));
    let head = service.ask("HEAD", "/with%20out/", "");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert!(
        Service::start(fill, |_| {}).get("/with%20out/").status == 404,
        "only where it is asked for"
    );
}

#[test]
fn compressed_forms_are_sent_to_whoever_accepts_them() {
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
    .aged();
    let accepting =
        |codings: &str| service.ask("GET", "/a.css", &format!("Accept-Encoding: {codings}\r\n"));
    let mut tags = Vec::new();
    for (codings, body, coding) in [
        ("gzip, br", "brotli", Some("br")),
        ("gzip", "gzipped", Some("gzip")),
        ("gzip;q=0", "plain", None),
        ("deflate", "plain", None),
    ] {
        let response = accepting(codings);
        assert_eq!(
            (response.text().as_str(), response.field("content-encoding")),
            (body, coding),
            "{codings}"
        );
        assert_eq!(response.field("content-type"), Some("text/css; charset=utf-8"));
        assert_eq!(response.field("vary"), Some("Accept-Encoding"));
        tags.push(response.field("etag").unwrap().to_owned());
    }
    assert!(tags[0] != tags[1] && tags[1] != tags[2], "each form has its own tag: {tags:?}");
    let ten = service.ask("GET", "/ten.txt", "Accept-Encoding: gzip\r\n");
    assert_eq!(ten.text(), "0123456789", "a form older than its file was made of something else");
}

#[test]
fn what_was_asked_to_be_said_is_said() {
    let service = Service::start(
        |root| {
            fs::create_dir(root.join("assets")).unwrap();
            fs::write(root.join("assets/app.js"), "js").unwrap();
            fs::write(root.join("404.html"), "<h1>nowhere").unwrap();
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
    let asset = service.ask("GET", "/assets/app.js", "Origin: https://app.example\r\n");
    assert_eq!(asset.field("cache-control"), Some("max-age=31536000, immutable"));
    assert_eq!(asset.field("x-frame-options"), Some("DENY"));
    assert_eq!(asset.field("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(asset.field("vary"), Some("Origin"));
    let stranger = service.ask("GET", "/ten.txt", "Origin: https://evil.example\r\n");
    assert_eq!(
        (stranger.field("access-control-allow-origin"), stranger.field("cache-control")),
        (None, Some("no-cache"))
    );
    let preflight = service.ask(
        "OPTIONS",
        "/ten.txt",
        "Origin: https://app.example\r\nAccess-Control-Request-Method: GET\r\n",
    );
    assert_eq!(preflight.status, 204);
    assert!(preflight.field("access-control-allow-methods").unwrap().contains("GET"));
    let missing = service.get("/nothing");
    assert_eq!((missing.status, missing.text().as_str()), (404, "<h1>nowhere"));
    assert_eq!(missing.field("content-type"), Some("text/html; charset=utf-8"));
    let beyond = service.ask("GET", "/ten.txt", "Range: bytes=10-\r\n");
    assert_eq!((beyond.status, beyond.text().as_str()), (416, "<h1>nowhere"));
    assert_eq!(beyond.field("content-range"), Some("bytes */10"));
}

#[test]
fn an_application_of_one_page_answers_everywhere() {
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

#[test]
fn dates_that_cannot_be_said_are_not() {
    let service = Service::start(
        |root| {
            for (name, seconds) in [("far", 4_000_000_000u64), ("today", 1_000_000_000)] {
                fs::write(root.join(name), name).unwrap();
                let file = fs::File::options().write(true).open(root.join(name)).unwrap();
                file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
            }
        },
        |_| {},
    )
    .aged();
    assert_eq!(service.get("/far").field("last-modified"), None, "it is yet to come");
    assert_eq!(service.get("/today").field("last-modified"), Some("Sun, 09 Sep 2001 01:46:40 GMT"));
}

#[test]
fn a_deleted_file_is_let_go_of() {
    let service = Service::plain().aged();
    let path = service.path("large.bin").display().to_string();
    // What is deleted has that behind its name.
    let is_open = || {
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|link| link.display().to_string().starts_with(&path))
    };
    assert!(service.get("/large.bin").body == large());
    assert!(is_open(), "it is kept for the next");
    fs::remove_file(service.path("large.bin")).unwrap();
    assert_eq!(service.get("/large.bin").status, 404);
    assert!(!is_open());
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    // A pipe that somebody has open and nobody reads.
    let _held = fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut service = Service::start(
        |_| {},
        |config| {
            config.access_log =
                Some(AccessLog { path: Some(path.clone()), format: LogFormat::Combined });
        },
    );
    let mut client = service.connect();
    let agent = "x".repeat(2000);
    for _ in 0..1000 {
        client.send(&format!("GET /ten.txt HTTP/1.1\r\nHost: h\r\nUser-Agent: {agent}\r\n\r\n"));
        assert_eq!(client.response(false).unwrap().status, 200);
    }
    let started = std::time::Instant::now();
    service.handle.reload().unwrap();
    drop(client);
    service.stop();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "it ends all the same: {:?}",
        started.elapsed()
    );
}

#[test]
fn requests_are_logged_and_the_log_can_be_moved_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let mut service = Service::start(
        |_| {},
        |config| {
            config.access_log =
                Some(AccessLog { path: Some(path.clone()), format: LogFormat::Json });
            config.put_bytes_max = Some(1 << 20);
            config.limits.drain_timeout = Duration::from_secs(1);
        },
    );
    service.ask("GET", "/ten.txt", "User-Agent: a\"b\r\n");
    service.get("/nothing");
    service.get("/large.bin");
    service.ask("POST", "/twice", "Content-Length: 1\r\nContent-Length: 2\r\n");
    let mut gone = service.connect();
    gone.send("PUT /half HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc");
    gone.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(gone.is_closed());
    let lines = |path: &std::path::Path| -> Vec<serde_json::Value> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    eventually(|| lines(&path).len() >= 5);
    let moved = folder.path().join("access.log.1");
    fs::rename(&path, &moved).unwrap();
    service.handle.reload().unwrap();
    assert_eq!(service.get("/empty").status, 200);
    // Whoever is cut off in the end is logged with what he got.
    let mut stuck = service.connect();
    stuck.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    // More than a head, so that it is sending.
    eventually(|| stuck.stream.peek(&mut [0; 1000]).unwrap() == 1000);
    service.stop();
    let (old, new) = (lines(&moved), lines(&path));
    assert_eq!((&old[0]["target"], &old[0]["user_agent"]), (&"/ten.txt".into(), &"a\"b".into()));
    assert_eq!((&old[1]["status"], &old[2]["body_bytes"]), (&404.into(), &large().len().into()));
    assert_eq!(
        (&old[3]["status"], &old[3]["refused_line"]),
        (&400.into(), &"POST /twice HTTP/1.1".into())
    );
    assert_eq!((&old[4]["status"], &old[4]["target"]), (&400.into(), &"/half".into()));
    assert_eq!((old.len(), new.len(), &new[0]["target"]), (5, 2, &"/empty".into()));
    let sent = new[1]["body_bytes"].as_u64().unwrap();
    assert!(new[1]["status"] == 200 && sent > 0 && sent < large().len() as u64, "{:?}", new[1]);
}
