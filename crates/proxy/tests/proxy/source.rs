//! From which address upstreams are connected.

use crate::bulk::{assert_bulk_is_spliced, exchange_bulk};
use crate::common::{LIMIT, Proxy, accept, lab, listen, upstream};
use haul_lab::{Kind, Lab};
use haul_proxy::{GroupConfig, SourceChoice, TrustedProxies};
use haul_testing::exchange;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs `ip` with these arguments, within a lab's host.
fn ip(host: &haul_lab::Host, arguments: &str) {
    let mut command = Command::new("ip");
    let status = host.run_program(command.args(arguments.split_ascii_whitespace()));
    assert!(status.unwrap().unwrap().success(), "ip {arguments}");
}

/// A lab whose hosts are not this machine's, which would keep their addresses and routes.
fn lab_of_its_own() -> Option<Lab> {
    let lab = lab();
    if lab.kind() == Kind::Loopback {
        eprintln!("SKIPPED: no address is added: {}", lab.caveats().join("; "));
        return None;
    }
    Some(lab)
}

/// A client and its upstream. The proxy closes an earlier connection a moment after its peers, and
/// resets clients until then.
fn connect_once_a_port_is_free(proxy: &Proxy, listener: &TcpListener) -> (TcpStream, TcpStream) {
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + LIMIT;
    loop {
        assert!(Instant::now() < deadline, "the port is not free again");
        let Ok(mut client) = proxy.try_connect() else { continue };
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let is_silent =
            client.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        client.set_read_timeout(Some(LIMIT)).unwrap();
        if is_silent && let Ok((server, _)) = listener.accept() {
            server.set_nonblocking(false).unwrap();
            server.set_read_timeout(Some(LIMIT)).unwrap();
            return (client, server);
        }
    }
}

/// Each source has its own ports, so two sources have twice as many.
#[test]
fn sources_take_turns_and_none_is_without_ports_while_another_has_some() {
    let Some(lab) = lab_of_its_own() else { return };
    let listener = listen(&lab);
    let sources = ["10.77.0.11", "10.77.0.12"];
    for source in sources {
        ip(&lab.sender, &format!("address add {source}/24 dev {}", lab.sender.device()));
    }
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        let addresses = sources.iter().map(|source| source.parse().unwrap()).collect();
        config.sockets.source = SourceChoice::Addresses(addresses);
        config.limits.connect_attempts_max = 1;
        // It is reloaded with an upstream at another port.
        config.process.confine = false;
    });
    // Of this range each source has two ports. The listener has one of another range.
    proxy.lab.sender.set_sysctl("net.ipv4.ip_local_port_range", "40000 40001").unwrap();
    let mut connections = Vec::new();
    let mut used: Vec<IpAddr> = Vec::new();
    for _ in 0..4 {
        let (client, server) = (proxy.connect(), accept(&listener));
        exchange(&client, &server);
        used.push(server.peer_addr().unwrap().ip());
        connections.push((client, server));
    }
    for source in sources {
        let source: IpAddr = source.parse().unwrap();
        assert_eq!(used.iter().filter(|&&other| other == source).count(), 2, "{used:?}");
    }
    exchange_bulk(&connections[0].0, &connections[0].1);
    // A port that is used for one peer is free for others.
    let other = listen(&proxy.lab);
    let mut reloaded = proxy.config.clone();
    reloaded.groups = vec![GroupConfig::new("servers", [upstream(&other)])];
    proxy.handle.reload(&reloaded).unwrap();
    let mut to_other = Vec::new();
    for _ in 0..4 {
        let mut client = proxy.connect();
        client.write_all(b"x").unwrap();
        to_other.push((client, accept(&other)));
    }
    drop(to_other);
    proxy.handle.reload(&proxy.config).unwrap();
    assert!(proxy.turns_away(), "a client without a port is reset");
    // The upstream is not at fault, so it is not ejected: the next client with a port reaches it.
    for _ in 0..4 {
        assert!(proxy.turns_away());
    }
    // The server ends first, so that the port waits (TIME_WAIT) on its host.
    let (client, server) = connections.pop().unwrap();
    drop(server);
    drop(client);
    let (client, server) = connect_once_a_port_is_free(&proxy, &listener);
    exchange(&client, &server);
    drop((client, server, connections));
    let log = proxy.finish();
    let shortages = log.iter().filter(|line| line["end"] == "shortage").count();
    assert!(shortages >= 5, "{log:?}");
    assert!(log.iter().all(|line| line["end"] != "unreachable"), "{log:?}");
    assert_bulk_is_spliced(log.iter().find(|line| line["id"] == 1).unwrap());
}

/// The proxy's host claims the packets to addresses of clients, and the upstream's host sends them
/// there.
#[test]
fn an_upstream_sees_the_clients_own_address() {
    let Some(lab) = lab_of_its_own() else { return };
    let listener = listen(&lab);
    let (device, proxy_address) = (lab.sender.device(), lab.sender.address());
    ip(&lab.receiver, &format!("route add 192.0.2.0/24 via {proxy_address}"));
    ip(&lab.sender, &format!("rule add iif {device} lookup 100"));
    ip(&lab.sender, "route add local 192.0.2.0/24 dev lo table 100");
    lab.sender.set_sysctl("net.ipv4.conf.all.rp_filter", "0").unwrap();
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        config.sockets.source = SourceChoice::Client;
        config.trusted_proxies = TrustedProxies::new(["10.77.0.2".parse().unwrap()]);
    });
    for client_address in ["192.0.2.7", "192.0.2.8"] {
        let mut client = proxy.connect();
        write!(client, "PROXY TCP4 {client_address} 10.0.0.1 5000 80\r\n").unwrap();
        let server = accept(&listener);
        assert_eq!(server.peer_addr().unwrap().ip().to_string(), client_address);
        exchange(&client, &server);
    }
    let log = proxy.finish();
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
}

/// The same with IPv6. A client of IPv4 is connected from the proxy's address.
#[test]
fn an_upstream_of_ipv6_sees_the_clients_own_address() {
    let Some(lab) = lab_of_its_own() else { return };
    if lab.sender.run(|| TcpListener::bind("[::1]:0")).unwrap().is_err() {
        return eprintln!("SKIPPED: this machine has no IPv6");
    }
    let (device, upstream_device) = (lab.sender.device(), lab.receiver.device());
    ip(&lab.sender, &format!("address add fd77::1/64 dev {device} nodad"));
    ip(&lab.receiver, &format!("address add fd77::2/64 dev {upstream_device} nodad"));
    ip(&lab.receiver, "route add 2001:db8::/64 via fd77::1");
    ip(&lab.sender, &format!("-6 rule add iif {device} lookup 100"));
    ip(&lab.sender, "route add local 2001:db8::/64 dev lo table 100");
    let listener = lab.receiver.run(|| TcpListener::bind("[fd77::2]:0")).unwrap().unwrap();
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        config.sockets.source = SourceChoice::Client;
        config.trusted_proxies = TrustedProxies::new(["10.77.0.2".parse().unwrap()]);
    });
    let own =
        ["2001:db8::7", "2001:db8::8"].map(|address| ("TCP6", address, "2001:db8::1", address));
    let other = ("TCP4", "192.0.2.7", "192.0.2.1", "fd77::1");
    for (family, client_address, to, expected) in own.into_iter().chain([other]) {
        let mut client = proxy.connect();
        write!(client, "PROXY {family} {client_address} {to} 5000 80\r\n").unwrap();
        let server = accept(&listener);
        assert_eq!(server.peer_addr().unwrap().ip().to_string(), expected);
        exchange(&client, &server);
    }
    let log = proxy.finish();
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
}
