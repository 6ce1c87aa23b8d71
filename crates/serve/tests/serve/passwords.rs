//! Who is let in, and that asking for it costs nobody else anything.

use crate::common::{Client, Response, Service};
use haul_serve::{BasicAuth, Tls};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// `Authorization` of ann, whose password is `sesame`, and of somebody who says that she is ann.
const ANN: &str = "Authorization: Basic YW5uOnNlc2FtZQ==\r\n";
const NOT_ANN: &str = "Authorization: Basic YW5uOm9wZW4=\r\n";

/// bcrypt's lowest cost and its usual one.
const QUICK: u32 = 4;
const USUAL: u32 = 10;

/// Writes a password file for ann as people do; false, and says so, where there is no program for it.
fn write_passwords(path: &Path, password: &str, cost: u32) -> bool {
    let mut command = Command::new("htpasswd");
    command.args(["-cbB", "-C", &cost.to_string()]).arg(path).args(["ann", password]);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: passwords are not tested, htpasswd: {error} (ci/install)");
            false
        }
    }
}

/// A service that asks for a password, ann's, which is `sesame`.
struct Vault {
    service: Service,
    passwords: PathBuf,
    _scratch: TempDir,
}

fn start(cost: u32) -> Option<Vault> {
    let scratch = tempfile::tempdir().unwrap();
    let passwords = scratch.path().join("passwords");
    if !write_passwords(&passwords, "sesame", cost) {
        return None;
    }
    let service = Service::start(
        |root| fs::write(root.join("401.html"), "ask the porter").unwrap(),
        |config| {
            config.basic_auth =
                Some(BasicAuth { file: passwords.clone(), realm: "the vault".into() });
            config.put_bytes_max = Some(100);
            config.content.error_pages = vec![(401, "/401.html".into())];
        },
    );
    Some(Vault { service, passwords, _scratch: scratch })
}

fn asks(client: &mut Client, method: &str, fields: &str) -> Response {
    client.send(&format!("{method} /ten.txt HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
    client.response(method == "HEAD").unwrap()
}

#[test]
fn nobody_gets_or_puts_anything_without_the_password() {
    let Some(vault) = start(QUICK) else { return };
    let service = &vault.service;
    let mut client = service.connect();
    for fields in
        ["", NOT_ANN, "Authorization: Bearer YW5uOnNlc2FtZQ==\r\n", "Authorization: Basic\r\n"]
    {
        let refused = asks(&mut client, "GET", fields);
        assert_eq!((refused.status, refused.text().as_str()), (401, "ask the porter"), "{fields}");
        let challenge = "Basic realm=\"the vault\", charset=\"UTF-8\"";
        assert_eq!(refused.field("www-authenticate"), Some(challenge));
        assert_eq!(asks(&mut client, "HEAD", fields).status, 401);
    }
    for target in ["/", "/nothing", "/large.bin", "/../etc/passwd"] {
        assert_eq!(service.get(target).status, 401, "what is there is not for strangers: {target}");
    }
    for _ in 0..3 {
        assert_eq!(asks(&mut client, "GET", ANN).text(), "0123456789");
        assert_eq!(asks(&mut client, "GET", NOT_ANN).status, 401, "on her connection, too");
    }
    assert_eq!(asks(&mut client, "GET", &format!("{ANN}Range: bytes=2-3\r\n")).text(), "23");
    assert_eq!(
        asks(&mut client, "OPTIONS", "").status,
        204,
        "browsers ask before they know the password"
    );

    let put = |fields: &str| service.ask("PUT", "/new", &format!("Content-Length: 0\r\n{fields}"));
    assert_eq!((put(""), put(NOT_ANN)).0.status, 401);
    assert!(!service.path("new").exists());
    assert_eq!(put(ANN).status, 201);
    client
        .send("PUT /more HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.response(false).unwrap().status, 401, "before the body, which is not read");
    assert!(client.is_closed());

    // All at once, each with its own.
    let mut client = service.connect();
    let target = "GET /ten.txt HTTP/1.1\r\nHost: h\r\n";
    client.send(&format!("{target}{NOT_ANN}\r\n{target}{ANN}\r\n{target}\r\n{target}{ANN}\r\n"));
    let statuses: Vec<_> = (0..4).map(|_| client.response(false).unwrap().status).collect();
    assert_eq!(statuses, [401, 200, 401, 200]);
}

#[test]
fn another_password_holds_from_the_reload_on() {
    let Some(vault) = start(QUICK) else { return };
    let Vault { service, passwords, .. } = &vault;
    let mut client = service.connect();
    assert_eq!(asks(&mut client, "GET", ANN).status, 200);
    fs::write(passwords, "ann:sesame\n").unwrap();
    let error = service.handle.reload().unwrap_err()[0].to_string();
    assert!(error.contains("line 1") && error.contains("htpasswd -B"), "{error}");
    assert_eq!(asks(&mut client, "GET", ANN).status, 200, "nothing was reloaded");
    write_passwords(passwords, "open", QUICK);
    service.handle.reload().unwrap();
    // The loop is woken; that it has been shows in its answers.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while asks(&mut client, "GET", ANN).status == 200 {
        assert!(std::time::Instant::now() < until);
    }
    assert_eq!(asks(&mut client, "GET", NOT_ANN).status, 200, "it is hers now");
    assert_eq!(asks(&mut client, "GET", ANN).status, 401);
}

#[test]
fn whoever_guesses_keeps_nobody_from_his_files() {
    let Some(vault) = start(USUAL) else { return };
    let service = &vault.service;
    let mut ann = service.connect();
    assert_eq!(asks(&mut ann, "GET", ANN).status, 200);
    let mut guessing: Vec<_> = (0..200).map(|_| service.connect()).collect();
    for client in &mut guessing {
        client.send(&format!("GET /ten.txt HTTP/1.1\r\nHost: h\r\n{NOT_ANN}\r\n"));
    }
    // Trying takes about 50 ms each and there are dozens of them: her requests wait for none.
    for _ in 0..100 {
        assert_eq!(asks(&mut ann, "GET", ANN).status, 200);
    }
    let answers: Vec<_> =
        guessing.iter_mut().map(|client| client.response(false).unwrap()).collect();
    let busy = answers.iter().filter(|answer| answer.status == 503).count();
    assert!(busy > 0, "there is a limit");
    assert!(answers.iter().all(|answer| matches!(answer.status, 401 | 503)));
    let told = answers.iter().filter(|answer| answer.status == 503);
    assert!(told.clone().all(|answer| answer.field("retry-after") == Some("1")));
    let tried = answers.len() - busy;
    assert!(tried < 64, "one address has its share of the places and no more: {tried}");
}

#[test]
fn a_file_that_clients_could_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let passwords = folder.path().join("passwords");
    fs::write(&passwords, "").unwrap();
    let mut config = haul_serve::Config::new(folder.path());
    config.basic_auth = Some(BasicAuth { file: passwords.clone(), realm: "r".into() });
    let refused = |config: &haul_serve::Config| {
        let error = haul_serve::Server::new(config).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().contains("move it out"), "{error}");
    };
    refused(&config);
    let elsewhere = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&passwords, elsewhere.path().join("link")).unwrap();
    config.basic_auth = Some(BasicAuth { file: elsewhere.path().join("link"), realm: "r".into() });
    refused(&config);
    config.basic_auth = None;
    let listen = vec!["127.0.0.1:0".parse().unwrap()];
    config.tls =
        Some(Tls { listen, certificate: passwords.clone(), key: passwords, in_kernel: false });
    refused(&config);
}
