//! What a proxy does, in lines for its operator: where clients come, and where they go.

use haul_proxy::{Address, Config, GroupConfig, ListenAddress, ListenerConfig};

/// Describes the proxy: in one line if all clients go to one group, otherwise in a line for each
/// listener and each group. `addresses` have the ports that the kernel chose.
pub fn lines(config: &Config, addresses: &[ListenAddress]) -> Vec<String> {
    let routed = routed_groups(config);
    let has_routes = config.listeners.iter().any(|listener| !listener.routes.is_empty());
    if let ([group], false) = (&routed[..], has_routes) {
        let places = list(addresses.iter().map(|listen| listen.address.to_string()));
        return vec![format!("clients at {places} are connected to {}", upstreams(group))];
    }
    // The sockets that systemd passes are of one listener.
    let is_each_one = addresses.len() == config.listeners.len();
    let listeners = config.listeners.iter().enumerate().map(|(at, listener)| {
        let address = addresses.get(at).filter(|_| is_each_one).map(|listen| &listen.address);
        listener_line(address.unwrap_or(&listener.address), listener)
    });
    let groups = routed.iter().map(|group| format!("group {}: {}", group.name, upstreams(group)));
    listeners.chain(groups).collect()
}

/// The groups that get clients.
fn routed_groups(config: &Config) -> Vec<&GroupConfig> {
    let unrouted: Vec<&str> = config.unrouted_groups().map(|group| group.name.as_str()).collect();
    config.groups.iter().filter(|group| !unrouted.contains(&group.name.as_str())).collect()
}

fn listener_line(address: &Address, listener: &ListenerConfig) -> String {
    let routes = listener.routed_groups().join(", ");
    match (&listener.group, routes.is_empty()) {
        (Some(group), true) => format!("clients at {address} go to group {group}"),
        (Some(group), false) => {
            format!("clients at {address} go by route to {routes}, others to {group}")
        }
        (None, _) => format!("clients at {address} go by route to {routes}, others are reset"),
    }
}

fn upstreams(group: &GroupConfig) -> String {
    list(group.upstreams.iter().map(|upstream| upstream.address.to_string()))
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_proxy::{Route, RouteCondition};

    #[test]
    fn each_listener_is_told_with_its_groups() {
        let group =
            |name: &str, upstream: &str| GroupConfig::new(name, [upstream.parse().unwrap()]);
        let mut config = Config::new([group("web", "10.0.0.1:80"), group("db", "10.0.0.2:5432")]);
        let listener = |port: &str, group| ListenerConfig::new(port.parse().unwrap(), group);
        config.listeners = vec![listener("127.0.0.1:0", Some("web"))];
        let bound = |ports: &[u16]| -> Vec<ListenAddress> {
            let address = |port| format!("127.0.0.1:{port}").parse().unwrap();
            ports
                .iter()
                .map(|port| ListenAddress { address: address(port), is_tls: false })
                .collect()
        };
        let one = ["clients at 127.0.0.1:81 are connected to 10.0.0.1:80"];
        assert_eq!(lines(&config, &bound(&[81])), one);
        config.listeners.push(listener("127.0.0.1:82", Some("db")));
        config.listeners.push(listener("127.0.0.1:83", None));
        let route = |group: &str| Route::new(RouteCondition::default(), group);
        config.listeners[1].routes = vec![route("web"), route("web")];
        config.listeners[2].routes = vec![route("web"), route("db")];
        let expected = [
            "clients at 127.0.0.1:81 go to group web",
            "clients at 127.0.0.1:82 go by route to web, others to db",
            "clients at 127.0.0.1:83 go by route to web, db, others are reset",
            "group web: 10.0.0.1:80",
            "group db: 10.0.0.2:5432",
        ];
        assert_eq!(lines(&config, &bound(&[81, 82, 83])), expected);
    }
}
