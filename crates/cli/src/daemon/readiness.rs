//! Notifications to systemd (`sd_notify`). Without systemd they go nowhere.

use sd_notify::NotifyState;

/// The service accepts connections.
pub fn notify_ready() {
    let _ = sd_notify::notify(false, &[NotifyState::Ready]);
}

/// The service drains.
pub fn notify_stopping() {
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
}
