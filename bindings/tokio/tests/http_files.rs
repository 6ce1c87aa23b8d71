//! The examples with hyper and axum: responses are right, and large bodies are sent from files.

use haul_testing::pattern;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A server that is killed at the end.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(example: &str, folder: &std::path::Path) -> Self {
        // `cargo test -p haul-tokio` builds the examples too, unlike with `--test`.
        let programs: PathBuf = std::env::current_exe().unwrap();
        let program = programs.parent().unwrap().parent().unwrap().join("examples").join(example);
        let mut child = Command::new(program)
            .arg("127.0.0.1:0")
            .arg(folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().rsplit_once(':').unwrap().1.parse().unwrap();
        Self { child, port }
    }

    /// The status line and the body of a response.
    fn get(&self, path: &str, header: &str) -> (String, Vec<u8>) {
        let mut socket = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n")
            .unwrap();
        let mut response = Vec::new();
        socket.read_to_end(&mut response).unwrap();
        let end = response.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(response[..end].to_vec()).unwrap();
        (head.lines().next().unwrap().to_owned(), response[end + 4..].to_vec())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn bodies_of_hyper_and_axum_are_sent_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let (large, small) = (pattern(1, 20_000_000), pattern(2, 1000));
    std::fs::write(folder.path().join("large"), &large).unwrap();
    std::fs::write(folder.path().join("small"), &small).unwrap();
    std::fs::write(folder.path().join("empty"), b"").unwrap();
    let made = Command::new("mkfifo").arg(folder.path().join("fifo")).status();
    assert!(made.unwrap().success());
    for example in ["hyper_files", "axum_files"] {
        let server = Server::start(example, folder.path());
        for _ in 0..3 {
            let (status, body) = server.get("/large", "");
            assert!(status.contains("200") && body == large, "{example}: {status}");
        }
        let (_, sent) = server.get("/sent", "");
        let sent: usize = String::from_utf8(sent).unwrap().trim().parse().unwrap();
        assert_eq!(sent, 3 * large.len(), "{example}: bytes were not sent from the file");
        assert!(server.get("/small", "").1 == small);
        assert!(server.get("/empty", "").1.is_empty());
        for path in ["/none", "/../Cargo.toml", "/", "/fifo"] {
            assert!(server.get(path, "").0.contains("404"), "{example}: {path}");
        }
        let concurrent: Vec<_> = std::thread::scope(|scope| {
            let get = || scope.spawn(|| server.get("/large", "").1);
            let threads: Vec<_> = (0..8).map(|_| get()).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(concurrent.iter().all(|body| *body == large), "{example}: wrong bytes");
    }
}
