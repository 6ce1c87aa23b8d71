//! HTTP Basic authentication (RFC 7617). Password verification must not delay other requests.

use crate::common::{Client, Response, Service};
use haul_serve::{BasicAuth, Tls};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use tempfile::TempDir;

/// `Authorization` of user ann with the password `sesame`, which is valid until it is changed.
const LOGIN_SESAME: &str = "Authorization: Basic YW5uOnNlc2FtZQ==\r\n";
/// `Authorization` of user ann with the password `open`.
const LOGIN_OPEN: &str = "Authorization: Basic YW5uOm9wZW4=\r\n";

/// bcrypt's lowest cost.
const COST_MIN: u32 = 4;
/// bcrypt's usual cost.
const COST_USUAL: u32 = 10;

/// Writes a password file for user ann with `htpasswd`; false, with a message, if it is missing.
fn write_passwords(path: &Path, password: &str, cost: u32) -> bool {
    let mut command = Command::new("htpasswd");
    command.args(["-cbB", "-C", &cost.to_string()]).arg(path).args(["ann", password]);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: passwords are not tested without htpasswd (ci/install): {error}");
            false
        }
    }
}

/// A service that requires a login.
struct ProtectedService {
    service: Service,
    /// The password file.
    passwords: PathBuf,
    /// Removes the password file's directory when the service ends.
    _scratch: TempDir,
}

/// Starts a service that admits user ann with the password `sesame`; `None` if htpasswd is missing.
fn start(cost: u32) -> Option<ProtectedService> {
    let scratch = tempfile::tempdir().unwrap();
    let passwords = scratch.path().join("passwords");
    if !write_passwords(&passwords, "sesame", cost) {
        return None;
    }
    let service = Service::start(
        |root| fs::write(root.join("401.html"), "login required").unwrap(),
        |config| {
            config.basic_auth = Some(BasicAuth::new(passwords.clone(), "test files"));
            config.put_bytes_max = Some(100);
            config.content.error_pages = vec![(401, "/401.html".into())];
        },
    );
    Some(ProtectedService { service, passwords, _scratch: scratch })
}

/// Requests `/ten.txt` and returns the response.
fn request(client: &mut Client, method: &str, fields: &str) -> Response {
    client.send(&format!("{method} /ten.txt HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
    client.response(method == "HEAD").unwrap()
}

#[test]
fn get_and_put_require_the_password() {
    let Some(protected) = start(COST_MIN) else { return };
    let service = &protected.service;
    let mut client = service.connect();
    for fields in
        ["", LOGIN_OPEN, "Authorization: Bearer YW5uOnNlc2FtZQ==\r\n", "Authorization: Basic\r\n"]
    {
        let refused = request(&mut client, "GET", fields);
        assert_eq!((refused.status, refused.text().as_str()), (401, "login required"), "{fields}");
        let challenge = "Basic realm=\"test files\", charset=\"UTF-8\"";
        assert_eq!(refused.field("www-authenticate"), Some(challenge));
        assert_eq!(request(&mut client, "HEAD", fields).status, 401);
    }
    for target in ["/", "/nothing", "/large.bin", "/../etc/passwd"] {
        assert_eq!(
            service.get(target).status,
            401,
            "without a login no response reveals which files exist: {target}"
        );
    }
    for _ in 0..3 {
        assert_eq!(request(&mut client, "GET", LOGIN_SESAME).text(), "0123456789");
        assert_eq!(
            request(&mut client, "GET", LOGIN_OPEN).status,
            401,
            "an earlier login on the connection does not count"
        );
    }
    assert_eq!(
        request(&mut client, "GET", &format!("{LOGIN_SESAME}Range: bytes=2-3\r\n")).text(),
        "23"
    );
    assert_eq!(
        request(&mut client, "OPTIONS", "").status,
        204,
        "browsers send OPTIONS before they have the password"
    );

    let put =
        |fields: &str| service.request("PUT", "/new", &format!("Content-Length: 0\r\n{fields}"));
    assert_eq!((put("").status, put(LOGIN_OPEN).status), (401, 401));
    assert!(!service.path("new").exists());
    assert_eq!(put(LOGIN_SESAME).status, 201);
    client
        .send("PUT /more HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.response(false).unwrap().status, 401, "refused before the body is read");
    assert!(client.is_closed());

    // Pipelined requests, each with its own login.
    let mut client = service.connect();
    let head = "GET /ten.txt HTTP/1.1\r\nHost: h\r\n";
    client.send(&format!(
        "{head}{LOGIN_OPEN}\r\n{head}{LOGIN_SESAME}\r\n{head}\r\n{head}{LOGIN_SESAME}\r\n"
    ));
    let statuses: Vec<_> = (0..4).map(|_| client.response(false).unwrap().status).collect();
    assert_eq!(statuses, [401, 200, 401, 200]);
}

#[test]
fn a_reload_replaces_the_passwords() {
    let Some(protected) = start(COST_MIN) else { return };
    let ProtectedService { service, passwords, .. } = &protected;
    let mut client = service.connect();
    assert_eq!(request(&mut client, "GET", LOGIN_SESAME).status, 200);
    fs::write(passwords, "ann:sesame\n").unwrap();
    let error = service.handle.reload().unwrap_err()[0].to_string();
    assert!(error.contains("line 1") && error.contains("htpasswd -B"), "{error}");
    assert_eq!(
        request(&mut client, "GET", LOGIN_SESAME).status,
        200,
        "a file with an error changes nothing"
    );
    write_passwords(passwords, "open", COST_MIN);
    service.handle.reload().unwrap();
    // The reload only wakes the event loop; its responses show when the new file is in use.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while request(&mut client, "GET", LOGIN_SESAME).status == 200 {
        assert!(std::time::Instant::now() < deadline);
    }
    assert_eq!(request(&mut client, "GET", LOGIN_OPEN).status, 200, "the new password is valid");
    assert_eq!(request(&mut client, "GET", LOGIN_SESAME).status, 401);
}

#[test]
fn password_guessing_delays_no_admitted_user() {
    let Some(protected) = start(COST_USUAL) else { return };
    let service = &protected.service;
    let mut ann = service.connect();
    assert_eq!(request(&mut ann, "GET", LOGIN_SESAME).status, 200);
    let mut guessers: Vec<_> = (0..200).map(|_| service.connect()).collect();
    for client in &mut guessers {
        client.send(&format!("GET /ten.txt HTTP/1.1\r\nHost: h\r\n{LOGIN_OPEN}\r\n"));
    }
    // A verification takes about 50 ms and dozens are queued. The requests of an admitted user wait
    // for none of them.
    for _ in 0..100 {
        assert_eq!(request(&mut ann, "GET", LOGIN_SESAME).status, 200);
    }
    let responses: Vec<_> =
        guessers.iter_mut().map(|client| client.response(false).unwrap()).collect();
    let busy = responses.iter().filter(|response| response.status == 503).count();
    assert!(busy > 0, "the queue has a limit");
    assert!(responses.iter().all(|response| matches!(response.status, 401 | 503)));
    let refused = responses.iter().filter(|response| response.status == 503);
    assert!(refused.clone().all(|response| response.field("retry-after") == Some("1")));
    let verified = responses.len() - busy;
    assert!(verified < 64, "one address gets only its share of the queue: {verified}");
}

#[test]
fn a_secret_in_the_served_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let passwords = directory.path().join("passwords");
    fs::write(&passwords, "").unwrap();
    let mut config = haul_serve::Config::new(directory.path());
    config.basic_auth = Some(BasicAuth::new(passwords.clone(), "r"));
    let assert_refused = |config: &haul_serve::Config| {
        let error = haul_serve::Server::new(config).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().contains("move it out"), "{error}");
    };
    assert_refused(&config);
    let outside = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&passwords, outside.path().join("link")).unwrap();
    config.basic_auth = Some(BasicAuth::new(outside.path().join("link"), "r"));
    assert_refused(&config);
    config.basic_auth = None;
    let listen = vec!["127.0.0.1:0".parse().unwrap()];
    config.tls = Some(Tls::new(listen, passwords.clone(), passwords, false));
    assert_refused(&config);
}

/// Without a delay between the reload and the request: other connections keep the loop busy.
#[test]
fn a_request_after_a_reload_needs_the_new_password() {
    let Some(protected) = start(COST_MIN) else { return };
    let (service, path) = (&protected.service, &protected.passwords);
    let mut files = Vec::new();
    for password in ["open", "sesame"] {
        assert!(write_passwords(path, password, COST_MIN));
        files.push(fs::read(path).unwrap());
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = service.connect();
                while !is_over.load(Relaxed) {
                    request(&mut client, "GET", "");
                }
            });
        }
        let mut client = service.connect();
        let mut admitted = 0;
        for round in 0..400 {
            fs::write(path, &files[round % 2]).unwrap();
            service.handle.reload().unwrap();
            let (valid, revoked) = if round % 2 == 0 {
                (LOGIN_OPEN, LOGIN_SESAME)
            } else {
                (LOGIN_SESAME, LOGIN_OPEN)
            };
            admitted += u32::from(request(&mut client, "GET", revoked).status == 200);
            assert_eq!(request(&mut client, "GET", valid).status, 200);
        }
        is_over.store(true, Relaxed);
        assert_eq!(admitted, 0, "revoked passwords were admitted");
    });
}
