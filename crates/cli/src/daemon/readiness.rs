//! Notifications to systemd (`sd_notify`). Without systemd they go nowhere.

use sd_notify::NotifyState;

/// The service accepts connections. A process that takes over from another one states that it is
/// the service's main process now.
pub fn notify_ready(takes_over: bool) {
    let main_process = NotifyState::MainPid(std::process::id());
    let states = [NotifyState::Ready, main_process];
    let _ = sd_notify::notify(false, if takes_over { &states } else { &states[..1] });
}

/// Tells systemd that another process is the service's main process now. Without this message
/// systemd would stop the service when this process ends.
pub fn notify_successor(pid: u32) {
    let _ = sd_notify::notify(false, &[NotifyState::MainPid(pid)]);
}

/// The service drains.
pub fn notify_stopping() {
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
}
