//! Routes that are never taken, because a route before them fits all of their clients.

use crate::config::{ListenerConfig, Route, RouteCondition, ServerNamePattern};

/// A sentence about each route, or name of a route, that clients never reach because of the order
/// of the routes.
pub fn caveats(listeners: &[ListenerConfig]) -> Vec<String> {
    listeners.iter().flat_map(listener_caveats).collect()
}

fn listener_caveats(listener: &ListenerConfig) -> Vec<String> {
    let mut caveats = Vec::new();
    for (index, route) in listener.routes.iter().enumerate() {
        let before = &listener.routes[..index];
        let names = &route.condition.server_names;
        let caught: Vec<_> = parts(&route.condition)
            .into_iter()
            .map(|part| before.iter().find(|earlier| covers(&earlier.condition, &part)))
            .collect();
        let Some(first) = caught.iter().flatten().next() else { continue };
        let is_whole = caught.iter().all(Option::is_some);
        caveats.push(caveat(route, first, is_whole, &caught_names(names, &caught)));
    }
    caveats
}

/// A condition for each server name of a condition, or the condition itself if it lacks names.
fn parts(condition: &RouteCondition) -> Vec<RouteCondition> {
    if condition.server_names.is_empty() {
        return vec![condition.clone()];
    }
    let part = |name: &ServerNamePattern| RouteCondition {
        server_names: vec![name.clone()],
        ..condition.clone()
    };
    condition.server_names.iter().map(part).collect()
}

/// Whether every client that fits `later`, which has at most one name, fits `earlier`.
fn covers(earlier: &RouteCondition, later: &RouteCondition) -> bool {
    if later.is_tls == Some(false) {
        return earlier.is_tls == Some(false);
    }
    // Only a client with a name fits a condition with names.
    let has_name = later.has_server_name.or((!later.server_names.is_empty()).then_some(true));
    earlier.is_tls != Some(false)
        && (earlier.has_server_name.is_none() || earlier.has_server_name == has_name)
        && (earlier.server_names.is_empty()
            || later
                .server_names
                .iter()
                .any(|name| earlier.server_names.iter().any(|pattern| pattern.includes(name))))
        && (earlier.protocols.is_empty()
            || !later.protocols.is_empty()
                && later.protocols.iter().all(|one| earlier.protocols.contains(one)))
}

fn caught_names(names: &[ServerNamePattern], caught: &[Option<&Route>]) -> String {
    let names = names.iter().zip(caught).filter(|(_, caught)| caught.is_some());
    names.map(|(name, _)| name.to_string()).collect::<Vec<_>>().join(", ")
}

fn caveat(route: &Route, first: &Route, is_whole: bool, names: &str) -> String {
    let (group, before) = (&route.group, &first.group);
    let remedy = if group == before {
        "remove it".to_owned()
    } else {
        format!("put the route to {group} before the route to {before}")
    };
    match (is_whole, names) {
        (true, "") => format!(
            "the route to the group {group} is never taken, because a route before it, to the \
             group {before}, fits the same clients: {remedy}"
        ),
        (true, names) => format!(
            "the route to the group {group} is never taken, because a route before it, to the \
             group {before}, fits {names}: {remedy}"
        ),
        (false, names) => format!(
            "clients of {names} do not take the route to the group {group}, because a route \
             before it, to the group {before}, fits them: {remedy}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(group: &str, names: &[&str], change: impl FnOnce(&mut RouteCondition)) -> Route {
        let server_names = names.iter().map(|name| name.parse().unwrap()).collect();
        let mut condition = RouteCondition { server_names, ..RouteCondition::default() };
        change(&mut condition);
        Route::new(condition, group)
    }

    fn caveats_of(routes: Vec<Route>) -> Vec<String> {
        let mut listener = ListenerConfig::new("127.0.0.1:0".parse().unwrap(), None);
        listener.routes = routes;
        caveats(&[listener])
    }

    #[test]
    fn a_route_whose_clients_an_earlier_route_takes_is_told() {
        let any = |_: &mut RouteCondition| {};
        let alpn = |condition: &mut RouteCondition| condition.protocols = vec!["h2".into()];
        let named = |condition: &mut RouteCondition| condition.has_server_name = Some(true);
        let plain = |condition: &mut RouteCondition| condition.is_tls = Some(false);
        for (earlier, later) in [
            (route("b", &["*.example.com"], any), route("a", &["login.example.com"], any)),
            (route("b", &["*.example.com"], any), route("a", &["*.eu.example.com"], any)),
            (route("b", &["x.net"], any), route("a", &["X.net"], alpn)),
            (route("b", &[], any), route("a", &["x.net"], any)),
            (route("b", &[], named), route("a", &["x.net"], any)),
            (route("b", &[], alpn), route("a", &["x.net"], alpn)),
            (route("b", &[], plain), route("a", &[], plain)),
        ] {
            let caveats = caveats_of(vec![earlier.clone(), later.clone()]);
            assert!(
                caveats.len() == 1 && caveats[0].contains("the group a is never taken"),
                "{caveats:?}: {earlier:?} {later:?}"
            );
        }
        let both = vec![
            route("b", &["*.example.com"], any),
            route("a", &["x.net", "www.example.com"], any),
        ];
        let caveats = caveats_of(both);
        assert!(caveats[0].starts_with("clients of www.example.com do not take"), "{caveats:?}");
    }

    #[test]
    fn routes_that_some_clients_reach_have_no_caveat() {
        let any = |_: &mut RouteCondition| {};
        let alpn = |condition: &mut RouteCondition| condition.protocols = vec!["h2".into()];
        let unnamed = |condition: &mut RouteCondition| condition.has_server_name = Some(false);
        let plain = |condition: &mut RouteCondition| condition.is_tls = Some(false);
        for (earlier, later) in [
            (route("b", &["login.example.com"], any), route("a", &["*.example.com"], any)),
            (route("b", &["*.example.com"], any), route("a", &["example.com"], any)),
            (route("b", &["*.example.com"], any), route("a", &["badexample.com"], any)),
            (route("b", &["x.net"], alpn), route("a", &["x.net"], any)),
            (route("b", &[], unnamed), route("a", &["x.net"], any)),
            (route("b", &["x.net"], any), route("a", &[], any)),
            (route("b", &[], any), route("a", &[], plain)),
            (route("b", &[], plain), route("a", &[], any)),
        ] {
            let caveats = caveats_of(vec![earlier.clone(), later.clone()]);
            assert_eq!(caveats, [""; 0], "{earlier:?} {later:?}");
        }
    }
}
