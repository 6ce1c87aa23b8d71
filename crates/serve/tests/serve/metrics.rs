//! What `/metrics` says is what happened.

use crate::common::{Client, Service, large};
use std::net::TcpStream;

#[test]
fn what_was_done_can_be_read_while_it_is_done() {
    let port = 9100;
    let service = Service::start(
        |_| {},
        |config| {
            // The namespace is this test's own: the port is free.
            let address = config.listen[0].to_string().replace(":0", &format!(":{port}"));
            config.metrics = Some(address.parse().unwrap());
        },
    );
    let address = std::net::SocketAddr::new(service.address.ip(), port);
    let ask = |target: &str| {
        let stream = service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
        let mut client = Client::of(stream);
        client.send(&format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
        client.response(false).unwrap()
    };
    let mut client = service.connect();
    for _ in 0..300 {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response(false).unwrap().status, 200);
    }
    for _ in 0..3 {
        assert!(service.get("/large.bin").body == large());
    }
    assert_eq!(service.get("/nothing").status, 404);
    let text = ask("/metrics").text();
    let sum = |start: &str, without: &str| -> f64 {
        let lines = text.lines().filter(|line| {
            line.starts_with(start) && (without.is_empty() || !line.contains(without))
        });
        let values: Vec<f64> =
            lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert!(!values.is_empty(), "no {start} in {text}");
        values.iter().sum()
    };
    let count = |start: &str| sum(start, "") as usize;
    assert_eq!(count("haul_responses_total{class=\"2xx\"}"), 303);
    assert_eq!(count("haul_responses_total{class=\"4xx\"}"), 1);
    assert_eq!(count("haul_connections_accepted_total"), 5);
    assert_eq!(count("haul_response_seconds_count"), 304);
    let files = sum("haul_sent_bytes_total{", "\"memory\"") as usize;
    assert_eq!(
        files,
        3 * large().len(),
        "bodies of files, and nothing else, by the paths of files"
    );
    assert!(count("haul_sent_bytes_total{path=\"memory\"}") > 300 * 10);
    assert!(sum("haul_timed_cpu_microseconds_total{", "") > 0.0, "one send in 127 is timed");
    assert!(
        sum("haul_timed_bytes_total{", "") < sum("haul_sent_bytes_total{", ""),
        "and not all are"
    );
    assert_eq!(ask("/").status, 404);
    assert_eq!(service.get("/metrics").status, 404, "the service's own address does not tell");
}
