//! Interoperability with other programs: responses are compared with nginx's, curl and wget resume
//! downloads, and chromium shows a listing.

use crate::common::{Client, Service, large_content, wait_until};
use crate::rfc9110::{TABLE, expand_fields};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The rows of [`TABLE`] for which nginx responds differently, and how. haul follows RFC 9110.
const DIFFERENCES: [(&str, &str); 5] = [
    ("14.2 malformed may be ignored", "nginx refuses the request, which is allowed too"),
    ("14.2 only GET has ranges", "nginx evaluates the ranges of HEAD"),
    ("13.1.2 If-None-Match in two lines", "nginx refuses a list in two lines"),
    ("13.1.3 If-Modified-Since later", "nginx requires the exact date (if_modified_since exact)"),
    ("13.1.4 If-Match takes precedence", "nginx evaluates If-Unmodified-Since too"),
];

#[test]
fn nginx_gives_the_same_responses() {
    let nginx = "/usr/sbin/nginx";
    if !std::path::Path::new(nginx).exists() {
        return eprintln!("SKIPPED: not compared with nginx, which is missing (ci/install)");
    }
    let service = Service::start_default();
    let file = fs::File::options().write(true).open(service.path("ten.txt")).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(784_111_777)).unwrap();
    let service = service.wait_for_tags();
    let scratch = tempfile::tempdir().unwrap();
    let address = SocketAddr::new(service.address.ip(), 8081);
    let text = format!(
        "daemon off; user root; worker_processes 1; pid {0}/pid; error_log {0}/errors;\n\
         events {{ }}\n\
         http {{ default_type text/plain; access_log off; \
         client_body_temp_path {0}/body; proxy_temp_path {0}/proxy;\n\
         fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;\n\
         server {{ listen {address}; root {1}; }} }}\n",
        scratch.path().display(),
        service.directory.path().display()
    );
    let configuration = scratch.path().join("nginx.conf");
    fs::write(&configuration, text).unwrap();
    let mut command = Command::new(nginx);
    command.arg("-c").arg(&configuration).arg("-e").arg(scratch.path().join("errors"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _nginx = service.lab.sender.start_program(command).unwrap();
    let connect = || service.lab.receiver.run(|| TcpStream::connect(address)).unwrap();
    wait_until("the server accepts", || connect().is_ok());
    let request_nginx = |method: &str, fields: &str| {
        let mut client = Client::new(connect().unwrap());
        client.send(&format!("{method} /ten.txt HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        client.response(method == "HEAD").unwrap()
    };
    let nginx_etag = request_nginx("GET", "").field("etag").unwrap().to_owned();
    let haul_etag = service.get("/ten.txt").field("etag").unwrap().to_owned();
    let mut differences = Vec::new();
    for (section, method, fields, _) in TABLE {
        let nginx = request_nginx(method, &expand_fields(fields, &nginx_etag));
        let haul = service.request(method, "/ten.txt", &expand_fields(fields, &haul_etag));
        let is_same = (nginx.status, nginx.field("content-range"))
            == (haul.status, haul.field("content-range"))
            && (nginx.status >= 400 || nginx.body == haul.body);
        if !is_same {
            differences.push((*section, nginx.status, haul.status));
        }
    }
    let sections: Vec<_> = differences.iter().map(|(section, ..)| *section).collect();
    let known: Vec<_> = DIFFERENCES.iter().map(|(section, _)| *section).collect();
    assert_eq!(sections, known, "(row, nginx's status, haul's status): {differences:?}");
}

#[test]
fn curl_and_wget_resume_downloads() {
    let service = Service::start_default().wait_for_tags();
    let large = large_content();
    let url = format!("http://{}/large.bin", service.address);
    for (program, arguments) in [
        ("curl", &["-sS", "--max-time", "20", "-C", "-", "-o", "got"][..]),
        ("wget", &["-q", "-c", "-O", "got"]),
    ] {
        for present_bytes in [0, 1, 1_000_000, large.len() - 1] {
            let directory = tempfile::tempdir().unwrap();
            let download = directory.path().join("got");
            fs::write(&download, &large[..present_bytes]).unwrap();
            let mut command = Command::new(program);
            command.args(arguments).arg(&url).current_dir(directory.path()).stdin(Stdio::null());
            match service.lab.receiver.run(|| command.output()).unwrap() {
                Ok(output) => {
                    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
                    assert!(output.status.success(), "{program} from {present_bytes}: {messages}");
                }
                Err(error) => {
                    eprintln!("SKIPPED: no download by {program} (ci/install): {error}");
                    break;
                }
            }
            assert!(fs::read(&download).unwrap() == large, "{program} from {present_bytes}");
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
        Err(error) => {
            return eprintln!("SKIPPED: listings are not tested in chromium (ci/install): {error}");
        }
    };
    let find =
        |page: &str, text: &str| page.find(text).unwrap_or_else(|| panic!("no {text} in {page}"));
    assert!(
        find(&page, "folder with spaces</bdi>/</a>")
            < find(&page, "&lt;b&gt;bold &amp; \u{e4}.txt</bdi></a>"),
        "{page}"
    );
    assert!(find(&page, "&lt;b&gt;bold") < find(&page, ">empty</bdi></a>"));
    assert!(page.contains(">4.9 KiB</td>"), "{page}");
    // The page's links, as a user would follow them.
    let by_size = dom("/?sort=size&order=desc").unwrap();
    assert!(find(&by_size, ">large.bin</bdi></a>") < find(&by_size, "&lt;b&gt;bold"), "{by_size}");
    assert!(find(&by_size, "&lt;b&gt;bold") < find(&by_size, ">empty</bdi></a>"));
    assert!(dom("/folder%20with%20spaces/").unwrap().contains(">inside.txt</bdi></a>"));
    assert!(dom("/folder%20with%20spaces/inside.txt").unwrap().contains("found"));
}
