//! Other programs beside it: the same answers as nginx, downloads that curl and wget have taken up again.

use crate::common::{Client, Service, eventually, large};
use crate::rfc9110::{TABLE, asked};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Where nginx means something else by the same request, and why haul does not follow.
const DIFFERENCES: [(&str, &str); 5] = [
    ("14.2 malformed may be ignored", "nginx refuses it, which is allowed too"),
    ("14.2 only GET has ranges", "nginx heeds the ranges of HEAD"),
    ("13.1.2 If-None-Match in two lines", "nginx refuses a list in two lines"),
    ("13.1.3 If-Modified-Since later", "nginx wants the very date (if_modified_since exact)"),
    ("13.1.4 If-Match comes first", "nginx heeds If-Unmodified-Since all the same"),
];

#[test]
fn nginx_answers_the_same() {
    let nginx = "/usr/sbin/nginx";
    if !std::path::Path::new(nginx).exists() {
        return eprintln!("SKIPPED: not compared with nginx, which is missing (ci/install)");
    }
    let service = Service::plain();
    let file = fs::File::options().write(true).open(service.path("ten.txt")).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(784_111_777)).unwrap();
    let service = service.aged();
    let scratch = tempfile::tempdir().unwrap();
    let address = SocketAddr::new(service.address.ip(), 8081);
    let text = format!(
        "daemon off; user root; worker_processes 1; pid {0}/pid; error_log {0}/errors;\nevents {{ }}\n\
         http {{ default_type text/plain; access_log off; client_body_temp_path {0}/body; proxy_temp_path {0}/proxy;\n\
         fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;\n\
         server {{ listen {address}; root {1}; }} }}\n",
        scratch.path().display(),
        service.folder.path().display()
    );
    let configuration = scratch.path().join("nginx.conf");
    fs::write(&configuration, text).unwrap();
    let mut command = Command::new(nginx);
    command.arg("-c").arg(&configuration).arg("-e").arg(scratch.path().join("errors"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _running = service.lab.sender.start_program(command).unwrap();
    let connect = || service.lab.receiver.run(|| TcpStream::connect(address)).unwrap();
    eventually(|| connect().is_ok());
    let ask_nginx = |method: &str, fields: &str| {
        let mut client = Client::of(connect().unwrap());
        client.send(&format!("{method} /ten.txt HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        client.response(method == "HEAD").unwrap()
    };
    let theirs = ask_nginx("GET", "").field("etag").unwrap().to_owned();
    let ours = service.get("/ten.txt").field("etag").unwrap().to_owned();
    let mut differing = Vec::new();
    for (section, method, fields, _) in TABLE {
        let nginx = ask_nginx(method, &asked(fields, &theirs));
        let haul = service.ask(method, "/ten.txt", &asked(fields, &ours));
        let same = (nginx.status, nginx.field("content-range"))
            == (haul.status, haul.field("content-range"))
            && (nginx.status >= 400 || nginx.body == haul.body);
        if !same {
            differing.push((*section, nginx.status, haul.status));
        }
    }
    let sections: Vec<_> = differing.iter().map(|(section, ..)| *section).collect();
    let known: Vec<_> = DIFFERENCES.iter().map(|(section, _)| *section).collect();
    assert_eq!(sections, known, "section, nginx's status, haul's: {differing:?}");
}

#[test]
fn downloads_are_taken_up_again() {
    let service = Service::plain().aged();
    let large = large();
    let url = format!("http://{}/large.bin", service.address);
    for (program, arguments) in [
        ("curl", &["-sS", "--max-time", "20", "-C", "-", "-o", "got"][..]),
        ("wget", &["-q", "-c", "-O", "got"]),
    ] {
        for already in [0, 1, 1_000_000, large.len() - 1] {
            let folder = tempfile::tempdir().unwrap();
            let got = folder.path().join("got");
            fs::write(&got, &large[..already]).unwrap();
            let mut command = Command::new(program);
            command.args(arguments).arg(&url).current_dir(folder.path()).stdin(Stdio::null());
            match service.lab.receiver.run(|| command.output()).unwrap() {
                Ok(output) => {
                    let words = String::from_utf8_lossy(&output.stderr).into_owned();
                    assert!(output.status.success(), "{program} from {already}: {words}");
                }
                Err(error) => {
                    eprintln!("SKIPPED: no download by {program} (ci/install): {error}");
                    break;
                }
            }
            assert!(fs::read(&got).unwrap() == large, "{program} from {already}");
        }
    }
}

#[test]
fn a_browser_shows_a_listing_and_follows_its_links() {
    let service = Service::start(
        |root| {
            fs::create_dir(root.join("folder with spaces")).unwrap();
            fs::write(root.join("folder with spaces/inside.txt"), "found").unwrap();
            fs::write(root.join("<b>bold & \u{e4}.txt"), "x".repeat(5000)).unwrap();
        },
        |config| config.content.listing = true,
    );
    let profile = tempfile::tempdir().unwrap();
    let dom = |target: &str| {
        let mut command = Command::new("chromium");
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ]);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command
            .args(["--dump-dom", &format!("http://{}{target}", service.address)])
            .stdin(Stdio::null());
        let output = service.lab.receiver.run(|| command.output()).unwrap();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let page = match dom("/") {
        Ok(page) => page,
        Err(error) => return eprintln!("SKIPPED: no look with a browser (ci/install): {error}"),
    };
    let at =
        |page: &str, what: &str| page.find(what).unwrap_or_else(|| panic!("no {what} in {page}"));
    assert!(
        at(&page, "folder with spaces/</a>") < at(&page, "&lt;b&gt;bold &amp; \u{e4}.txt</a>"),
        "{page}"
    );
    assert!(at(&page, "&lt;b&gt;bold") < at(&page, ">empty</a>"));
    assert!(page.contains(">4.9 KiB</td>"), "{page}");
    // The links that the page has, as a person would click them.
    let by_size = dom("/?sort=size&order=desc").unwrap();
    assert!(at(&by_size, ">large.bin</a>") < at(&by_size, "&lt;b&gt;bold"), "{by_size}");
    assert!(at(&by_size, "&lt;b&gt;bold") < at(&by_size, ">empty</a>"));
    assert!(dom("/folder%20with%20spaces/").unwrap().contains(">inside.txt</a>"));
    assert!(dom("/folder%20with%20spaces/inside.txt").unwrap().contains("found"));
}
