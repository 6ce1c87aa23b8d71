//! How to allow namespaces where they are refused, by the settings of this machine.

use std::fs;

/// Sysctls that can forbid namespaces to an ordinary user: the name, the value that refuses, and
/// the command that allows.
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
    fix_for(rustix::process::geteuid().is_root(), |name| {
        fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/")))
            .ok()
            .map(|text| text.trim().to_owned())
    })
}

fn fix_for(is_root: bool, value: impl Fn(&str) -> Option<String>) -> String {
    let refuses = |(name, refusing, _): &&(&str, &str, &str)| {
        value(name).is_some_and(|found| found == *refusing)
    };
    let fixes: Vec<&str> = SETTINGS.iter().filter(refuses).map(|(_, _, fix)| *fix).collect();
    let as_root = if is_root { "" } else { "run as root, or " };
    if fixes.is_empty() {
        return format!(
            "{as_root}in a container use --cap-add=SYS_ADMIN,NET_ADMIN and a seccomp profile with \
             unshare, or --privileged (no setting of this machine refuses namespaces)"
        );
    }
    format!("{as_root}{}", fixes.join(", and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_settings_that_exist_and_refuse() {
        let ubuntu = fix_for(false, |name| match name {
            "kernel.apparmor_restrict_unprivileged_userns" => Some("1".into()),
            "user.max_user_namespaces" => Some("127000".into()),
            _ => None,
        });
        assert!(ubuntu.contains("AppArmor") && !ubuntu.contains("userns_clone"), "{ubuntu}");
        let debian =
            fix_for(false, |name| (name == "kernel.unprivileged_userns_clone").then(|| "0".into()));
        assert_eq!(debian, "run as root, or sysctl -w kernel.unprivileged_userns_clone=1");
        assert!(fix_for(false, |_| None).starts_with("run as root, or in a container"));
        assert!(fix_for(true, |_| None).starts_with("in a container"));
    }
}
