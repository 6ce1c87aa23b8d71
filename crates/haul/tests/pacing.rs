//! Detection of pacing: a socket that an earlier congestion control left paced is reported, and a
//! socket whose congestion control was set before it connected is not.

use haul::Sender;
use haul::pacing::Pacing;
use haul_lab::{Lab, Settings};
use rustix::net::sockopt::set_tcp_congestion;
use rustix::net::{AddressFamily, SocketType, connect, ipproto, socket};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Serializes the tests: each would otherwise detect the pacing timers of the other's sockets.
static CPU: Mutex<()> = Mutex::new(());

/// Creates a lab whose hosts use BBR by default, as many tuned servers do.
///
/// Returns `None` and prints the reason if there is no lab or no BBR.
fn lab_with_bbr() -> Option<Lab> {
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("SKIPPED: there is no lab: {error}");
            return None;
        }
    };
    for host in [&lab.sender, &lab.receiver] {
        // A namespace may use what net.ipv4.tcp_allowed_congestion_control of the machine lists.
        if let Err(error) = host.set_sysctl("net.ipv4.tcp_congestion_control", "bbr") {
            eprintln!("SKIPPED: bbr cannot be a namespace's default here: {error}");
            return None;
        }
    }
    Some(lab)
}

/// Sends a file through `from` on the sending host and returns the pacing that the sender detects.
fn detect_pacing(lab: &Lab, from: TcpStream, to: &TcpStream) -> Option<Pacing> {
    const FILE_BYTES: u64 = 4 << 20;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![1; FILE_BYTES as usize]).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            lab.receiver.run(|| {
                let mut buffer = vec![0; 128 << 10];
                while { to }.read(&mut buffer).is_ok_and(|count| count > 0) {}
            })
        });
        lab.sender
            .run(|| {
                let mut sender = Sender::new(from).unwrap();
                for _ in 0..64 {
                    // 1 MiB at a time, as a server sends before it turns to its next connection.
                    for part in 0..4 {
                        sender.send_file_all(&file, part << 20..(part + 1) << 20).unwrap();
                    }
                }
                let pacing = sender.pacing().unwrap();
                sender.socket().shutdown(Shutdown::Write).unwrap();
                pacing
            })
            .unwrap()
    })
}

/// Returns a connection whose sender has set its congestion control before connecting.
fn connect_with(lab: &Lab, congestion: &str) -> (TcpStream, TcpStream) {
    let address = SocketAddr::new(lab.receiver.address(), 0);
    let listener = lab.receiver.run(|| TcpListener::bind(address).unwrap()).unwrap();
    let to = listener.local_addr().unwrap();
    let from = lab.sender.run(|| {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP)).unwrap();
        set_tcp_congestion(&socket, congestion).unwrap();
        connect(&socket, &to).unwrap();
        TcpStream::from(socket)
    });
    (from.unwrap(), listener.accept().unwrap().0)
}

#[test]
fn pacing_left_over_from_bbr_is_detected() {
    let _guard = CPU.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(lab) = lab_with_bbr() else { return };
    let (from, to) = lab.connect().unwrap();
    assert_eq!(detect_pacing(&lab, from, &to), Some(Pacing::CongestionControl("bbr".into())));
    let leftover = Pacing::Leftover { congestion: "reno".into(), earlier: "bbr".into() };
    // The evidence is the number of timer interrupts. Other programs on the CPUs can delay the
    // timers, so that a transfer has few, but hardly five transfers.
    let mut detections = (0..5).map(|_| {
        let (from, to) = lab.connect().unwrap();
        // Too late, because BBR enabled pacing in the handshake.
        set_tcp_congestion(&from, "reno").unwrap();
        detect_pacing(&lab, from, &to)
    });
    assert!(detections.any(|pacing| pacing.as_ref() == Some(&leftover)), "{leftover:?}");
    // In time: the congestion control is set before the handshake.
    let (from, to) = connect_with(&lab, "reno");
    assert_eq!(detect_pacing(&lab, from, &to), None);
}

#[test]
fn only_a_paced_socket_is_reported() {
    let _guard = CPU.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error) => return eprintln!("SKIPPED: there is no lab: {error}"),
    };
    for host in [&lab.sender, &lab.receiver] {
        host.set_sysctl("net.ipv4.tcp_congestion_control", "reno").unwrap();
    }
    let (from, to) = lab.connect().unwrap();
    assert_eq!(detect_pacing(&lab, from, &to), None);
    let (from, to) = lab.connect().unwrap();
    haul_sys::sockopt::set_max_pacing_rate(&from, 1_000_000_000).unwrap();
    assert_eq!(detect_pacing(&lab, from, &to), Some(Pacing::MaxRate(1_000_000_000)));
}
