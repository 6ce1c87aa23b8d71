//! The values that `/metrics` reports match the traffic.

use crate::common::{Client, Service, large_content};
use std::net::TcpStream;

#[test]
fn metrics_of_a_running_service_match_its_traffic() {
    let port = 9100;
    let service = Service::start(
        |_| {},
        |config| {
            // The test has a separate network namespace, so the port is free.
            let address = config.listen[0].to_string().replace(":0", &format!(":{port}"));
            config.metrics = Some(address.parse().unwrap());
        },
    );
    let address = std::net::SocketAddr::new(service.address.ip(), port);
    let request = |target: &str| {
        let stream = service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
        let mut client = Client::new(stream);
        client.send(&format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
        client.response(false).unwrap()
    };
    let mut client = service.connect();
    for _ in 0..300 {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.response(false).unwrap().status, 200);
    }
    for _ in 0..3 {
        assert!(service.get("/large.bin").body == large_content());
    }
    assert_eq!(service.get("/nothing").status, 404);
    let text = request("/metrics").text();
    let sum = |prefix: &str, excluded: &str| -> f64 {
        let lines = text.lines().filter(|line| {
            line.starts_with(prefix) && (excluded.is_empty() || !line.contains(excluded))
        });
        let values: Vec<f64> =
            lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert!(!values.is_empty(), "no {prefix} in {text}");
        values.iter().sum()
    };
    let count = |prefix: &str| sum(prefix, "") as usize;
    assert_eq!(count("haul_responses_total{class=\"2xx\"}"), 303);
    assert_eq!(count("haul_responses_total{class=\"4xx\"}"), 1);
    assert_eq!(count("haul_connections_accepted_total"), 5);
    assert_eq!(count("haul_response_seconds_count"), 304);
    let file_bytes = sum("haul_sent_bytes_total{", "\"memory\"") as usize;
    assert_eq!(
        file_bytes,
        3 * large_content().len(),
        "the send methods for files carry the bodies of files and nothing else"
    );
    assert!(count("haul_sent_bytes_total{path=\"memory\"}") > 300 * 10);
    assert!(sum("haul_timed_cpu_seconds_total{", "") > 0.0, "one send in 127 is timed");
    assert!(
        sum("haul_timed_bytes_total{", "") < sum("haul_sent_bytes_total{", ""),
        "not every send is timed"
    );
    assert_eq!(request("/").status, 404);
    assert_eq!(service.get("/metrics").status, 404, "the file listener serves no metrics");
}
