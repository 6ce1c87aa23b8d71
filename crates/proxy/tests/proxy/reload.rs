//! Reloads while connections continue.

use crate::common::{LIMIT, Proxy, accept, lab, listen, upstream};
use haul_proxy::{CheckConfig, GroupConfig};
use haul_server::command_socket::send_command;
use haul_testing::exchange;
use serde_json::Value;
use std::io::Read;
use std::time::{Duration, Instant};

#[test]
fn new_clients_take_the_new_upstreams_and_connections_continue() {
    let lab = lab();
    let (old, new) = (listen(&lab), listen(&lab));
    let (first, second) = (upstream(&old), upstream(&new));
    let proxy = Proxy::start(lab, [first], |config| config.process.confine = false);
    let client = proxy.connect();
    let server = accept(&old);
    exchange(&client, &server);
    let mut config = proxy.config.clone();
    config.groups = vec![GroupConfig::new("servers", [second.clone()])];
    assert_eq!(proxy.handle.reload(&config).unwrap(), [""; 0]);
    for _ in 0..3 {
        let client = proxy.connect();
        let server = accept(&new);
        exchange(&client, &server);
    }
    exchange(&client, &server);
    drop((client, server));
    // The rules of access are also reloaded.
    config.access.deny = vec!["10.77.0.0/24".parse().unwrap()];
    proxy.handle.reload(&config).unwrap();
    let mut denied = proxy.connect();
    assert!(!matches!(denied.read(&mut [0]), Ok(1..)));
    let log = proxy.finish();
    assert_eq!(log.len(), 4, "{log:?}");
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
    let to_new = log.iter().filter(|line| line["upstream"] == second.to_string());
    assert_eq!(to_new.count(), 3, "{log:?}");
}

/// The upstream that was ejected before the reload is not tried by each loop again.
#[test]
fn an_upstream_that_stays_keeps_what_is_known_of_it() {
    let lab = lab();
    let (gone, listener) = (listen(&lab), listen(&lab));
    let upstreams = [upstream(&gone), upstream(&listener)];
    drop(gone);
    let proxy = Proxy::start(lab, upstreams, |config| config.process.confine = false);
    let connect = || drop((proxy.connect(), accept(&listener)));
    for _ in 0..6 {
        connect();
    }
    let mut config = proxy.config.clone();
    config.groups[0].upstreams.reverse();
    for _ in 0..3 {
        proxy.handle.reload(&config).unwrap();
        connect();
        connect();
    }
    let log = proxy.finish();
    let attempts: u64 = log.iter().map(|line| line["connect_attempts"].as_u64().unwrap()).sum();
    assert_eq!(attempts, 12 + 3, "{log:?}");
}

#[test]
fn a_configuration_that_cannot_be_put_in_force_changes_nothing() {
    let lab = lab();
    let (listener, other) = (listen(&lab), listen(&lab));
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| config.process.confine = true);
    let is_refused = |expected: &str, change: &dyn Fn(&mut haul_proxy::Config)| {
        let mut config = proxy.config.clone();
        change(&mut config);
        let error = proxy.handle.reload(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    is_refused("no group nowhere", &|config| config.listeners[0].group = Some("nowhere".into()));
    is_refused("(127.0.0.1:0): use --upgrade", &|config| {
        config.listeners[0].address = "127.0.0.1:0".parse().unwrap();
    });
    let address = proxy.config.listeners[0].address.to_string();
    is_refused(&format!("({address}): use --upgrade"), &|config| config.listeners.clear());
    is_refused(&format!("({address}): use --upgrade"), &|config| {
        config.listeners.push(config.listeners[0].clone());
    });
    is_refused("had this port at the start", &|config| {
        config.groups[0].upstreams = vec![upstream(&other)];
    });
    let mut config = proxy.config.clone();
    config.limits.connections_max = 1;
    config.limits.timeouts.lifetime = Some(LIMIT);
    let caveats = proxy.handle.reload(&config).unwrap();
    let expected = "the changes of max-connections, lifetime need --upgrade";
    assert!(caveats[0].contains(expected), "{caveats:?}");
    let client = proxy.connect();
    let server = accept(&listener);
    exchange(&client, &server);
    drop((client, server));
    proxy.finish();
}

/// A check that is gone finds nothing up again, so what it has found is forgotten.
#[test]
fn a_reload_begins_and_ends_the_check_of_a_group() {
    let lab = lab();
    let closed = listen(&lab);
    let address = upstream(&closed);
    drop(closed);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let proxy =
        Proxy::start(lab, [address], |config| config.reporting.control = Some(control.clone()));
    let wait_for = |is_up: bool, is_checked: bool| {
        let deadline = Instant::now() + LIMIT;
        loop {
            let answer = send_command(&control, "upstreams").unwrap();
            let answer: Value = serde_json::from_str(&answer).unwrap();
            let upstream = &answer["upstreams"][0];
            if upstream["is_up"] == is_up && upstream["check"].is_object() == is_checked {
                return upstream["check"].clone();
            }
            assert!(Instant::now() < deadline, "{upstream}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    assert!(wait_for(true, false).is_null());
    let mut config = proxy.config.clone();
    let mut check = CheckConfig::new(Duration::from_millis(20));
    check.fall = check.fall.saturating_add(1);
    config.groups[0].check = Some(check);
    proxy.handle.reload(&config).unwrap();
    let check = wait_for(false, true);
    assert!(check["failed"].as_u64().unwrap() >= 4, "{check}");
    assert!(check["error"].as_str().unwrap().contains("refused"), "{check}");
    proxy.handle.reload(&proxy.config).unwrap();
    wait_for(true, false);
    proxy.finish();
}
