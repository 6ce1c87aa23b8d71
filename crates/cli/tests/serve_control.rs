//! `haul serve control`, and `haul serve --check`, which creates no file.

mod common {
    pub mod command;
    pub mod schema;
    pub mod serve_process;
}

use common::command::{haul, run};
use common::schema::assert_valid;
use common::serve_process::{ServerProcess, folder_with_file, serve};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Creates a self-signed certificate and its key.
fn create_certificate(folder: &Path) {
    let status = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "certificate.pem"])
        .current_dir(folder)
        .stderr(std::process::Stdio::null())
        .status();
    assert!(status.expect("openssl is missing: run ci/install").success());
}

fn control(socket: &Path, arguments: &[&str]) -> (Output, String) {
    run(haul(&["serve", "control"]).arg(socket).args(arguments))
}

/// A renewal hook must notice that the new certificate is not in force: a reload by SIGHUP
/// succeeded, and the old certificate was sent until it had expired.
#[test]
fn a_reload_that_fails_has_an_exit_code() {
    let (folder, private) = (folder_with_file(), tempfile::tempdir().unwrap());
    let path = |name: &str| private.path().join(name);
    create_certificate(private.path());
    let text = format!(
        "dir = {:?}\nlisten = [\"127.0.0.1:0\"]\ntls-listen = [\"127.0.0.1:0\"]\n\
         tls-certificate = {:?}\ntls-key = {:?}\naccess-log = {:?}\n",
        folder.path(),
        path("certificate.pem"),
        path("key.pem"),
        path("log")
    );
    fs::write(path("serve.toml"), text).unwrap();
    let socket = path("control");
    let mut command = haul(&["serve", "--config"]);
    let server =
        ServerProcess::start(command.arg(path("serve.toml")).arg("--control").arg(&socket));

    let (output, transcript) = control(&socket, &["reload"]);
    assert_eq!(output.status.code(), Some(0), "{transcript}");
    let names = format!("reloaded: the certificate {}, ", path("certificate.pem").display());
    assert!(transcript.contains(&names) && !transcript.contains("warning"), "{transcript}");

    // A key without its certificate.
    let old_certificate = fs::read(path("certificate.pem")).unwrap();
    create_certificate(private.path());
    let new_certificate = fs::read(path("certificate.pem")).unwrap();
    fs::write(path("certificate.pem"), old_certificate).unwrap();
    let (output, transcript) = control(&socket, &["reload"]);
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.starts_with("haul: not reloaded: TLS, ") && error.lines().count() == 1,
        "{error}"
    );
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.starts_with("reloaded: the access log /"), "the log was opened again: {told}");
    let (_, transcript) = control(&socket, &["status"]);
    assert!(transcript.contains("failed: TLS, "), "{transcript}");
    // Hooks and systemd see the failure in every form of the command.
    let (output, transcript) = control(&socket, &["reload", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert_valid("serve-control", &serde_json::from_slice(&output.stdout).unwrap());

    // Every client would refuse a chain with a part that is not a certificate.
    let garbage = b"-----BEGIN CERTIFICATE-----\naGVsbG8gd29ybGQ=\n-----END CERTIFICATE-----\n";
    fs::write(path("certificate.pem"), [&new_certificate[..], garbage].concat()).unwrap();
    let (output, transcript) = control(&socket, &["reload"]);
    assert_eq!(output.status.code(), Some(1), "{transcript}");

    fs::write(path("certificate.pem"), new_certificate).unwrap();
    // A reload does not read the options again.
    fs::write(path("serve.toml"), "dir = \"/nowhere\"\n").unwrap();
    let (output, transcript) = control(&socket, &["reload"]);
    assert_eq!(output.status.code(), Some(0), "{transcript}");
    assert!(transcript.contains("serve.toml changed after the start"), "{transcript}");
    let (output, _) = control(&socket, &["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_valid("serve-control", &status);
    let status = &status["status"];
    assert!(status["reload"]["time"].is_string() && status["reload"]["error"].is_null());
    assert_eq!(status["pid"], server.process.id());
    assert_eq!(status["addresses"][0], server.address());
    assert!(server.get("/a.txt").ends_with("content"));
}

#[test]
fn the_end_of_the_server_removes_the_control_socket() {
    let (folder, private) = (folder_with_file(), tempfile::tempdir().unwrap());
    let socket = private.path().join("control");
    let mut command = serve(folder.path(), &["--listen", "127.0.0.1:0", "--control"]);
    let server = ServerProcess::start(command.arg(&socket));
    let (output, transcript) = control(&socket, &["status"]);
    assert_eq!(output.status.code(), Some(0), "{transcript}");
    server.signal(Signal::TERM);
    let (code, rest) = server.wait();
    assert_eq!(code, Some(0), "{rest}");
    assert!(!socket.exists(), "the socket's file is removed");
    let (output, transcript) = control(&socket, &["reload"]);
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(transcript.contains("no haul serve runs with this --control"), "{transcript}");
}

/// The user who checks may be root, and the service's user could not open root's files.
#[test]
fn a_check_creates_no_file() {
    let (folder, state) = (folder_with_file(), tempfile::tempdir().unwrap());
    let names = || {
        let entries = fs::read_dir(state.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
    };
    let before = fs::metadata(state.path()).unwrap().modified().unwrap();
    let path = |name: &str| state.path().join(name).to_str().unwrap().to_owned();
    let listen = format!("unix:{}", path("socket"));
    let (log, socket) = (path("log"), path("control"));
    let options =
        ["--check", "--listen", &listen, "--access-log", &log, "--control", &socket, "--allow-put"];
    let (output, transcript) = run(&mut serve(folder.path(), &options));
    assert!(output.status.success(), "{transcript}");
    assert!(!transcript.contains("another process listens"), "{transcript}");
    assert!(names().is_empty(), "{:?}", names());
    let after = fs::metadata(state.path()).unwrap().modified().unwrap();
    assert_eq!(before, after, "a file was created and removed");

    // The files of the running service stay.
    let server = ServerProcess::start(&mut serve(
        folder.path(),
        &[&options[1..], &["--listen", "127.0.0.1:0"]].concat(),
    ));
    let (output, transcript) = run(&mut serve(folder.path(), &options));
    assert!(output.status.success(), "{transcript}");
    for used in [&listen, &format!("unix:{socket}")] {
        let warning = format!("warning: another process listens on {used}.");
        assert!(transcript.contains(&warning), "{warning:?} in {transcript}");
    }
    let (output, transcript) = control(Path::new(&socket), &["status"]);
    assert!(output.status.success(), "{transcript}");
    drop(server);

    // What a start cannot create is an error of the check.
    for option in ["--access-log", "--control"] {
        let missing = path("missing/file");
        let (output, transcript) = run(&mut serve(folder.path(), &["--check", option, &missing]));
        assert!(!output.status.success() && transcript.contains(&missing), "{transcript}");
    }
}
