//! How to allow namespaces where they are refused, by the settings of this machine.

use std::fs;

/// Settings that forbid an ordinary user's namespaces: the name, the value that refuses them (or
/// for 0 the value and nothing else), and the command that lifts it.
const SETTINGS: [(&str, &str, &str); 5] = [
    ("kernel.unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "an AppArmor profile for haul that permits `userns,`, or sysctl -w \
         kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("user.max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("user.max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=10000"),
    ("user.max_mnt_namespaces", "0", "sysctl -w user.max_mnt_namespaces=10000"),
];

/// States how to allow namespaces: the settings that this machine has and that refuse them, or what
/// else may refuse them.
pub fn namespace_fix() -> String {
    fix_for(|name| {
        fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/")))
            .ok()
            .map(|text| text.trim().to_owned())
    })
}

fn fix_for(value: impl Fn(&str) -> Option<String>) -> String {
    let refuses = |(name, refusing, _): &&(&str, &str, &str)| {
        value(name).is_some_and(|found| found == *refusing)
    };
    let fixes: Vec<&str> = SETTINGS.iter().filter(refuses).map(|(_, _, fix)| *fix).collect();
    if fixes.is_empty() {
        return "run as root; no setting of this machine refuses namespaces, so a container or a \
                seccomp filter does: in a container use --cap-add=SYS_ADMIN,NET_ADMIN and a \
                seccomp profile with unshare, or --privileged"
            .into();
    }
    format!("run as root, or {}", fixes.join(", and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_settings_that_exist_and_refuse() {
        let ubuntu = fix_for(|name| match name {
            "kernel.apparmor_restrict_unprivileged_userns" => Some("1".into()),
            "user.max_user_namespaces" => Some("127000".into()),
            _ => None,
        });
        assert!(ubuntu.contains("AppArmor") && !ubuntu.contains("userns_clone"), "{ubuntu}");
        let debian =
            fix_for(|name| (name == "kernel.unprivileged_userns_clone").then(|| "0".into()));
        assert_eq!(debian, "run as root, or sysctl -w kernel.unprivileged_userns_clone=1");
        assert!(fix_for(|_| None).contains("seccomp"));
    }
}
