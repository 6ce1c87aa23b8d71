//! A socket that an earlier congestion control left paced is found out, and one that was set up in time is not.

use haul::Sender;
use haul::pacing::Pacing;
use haul_lab::{Lab, Settings};
use rustix::net::sockopt::set_tcp_congestion;
use rustix::net::{AddressFamily, SocketType, connect, ipproto, socket};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Timers of one test's sockets would be seen by the other's.
static CPU: Mutex<()> = Mutex::new(());

/// A lab whose hosts' default is BBR, as on many tuned servers; `None`, with a word on why, where that cannot be had.
fn lab_with_bbr() -> Option<Lab> {
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("SKIPPED: there is no lab: {error}");
            return None;
        }
    };
    for host in [&lab.sender, &lab.receiver] {
        // A namespace may take what the machine allows everybody.
        if let Err(error) = host.set_sysctl("net.ipv4.tcp_congestion_control", "bbr") {
            eprintln!("SKIPPED: bbr cannot be a namespace's default here: {error}");
            return None;
        }
    }
    Some(lab)
}

/// Sends a file through `from` on the sending host, and asks the sender why it is paced.
fn pacing(lab: &Lab, from: TcpStream, to: &TcpStream) -> Option<Pacing> {
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
                    // As much at a time as a server gives a connection before it turns to the next.
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

/// A connection whose sender has its congestion control before it connects.
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
fn what_bbr_has_left_on_is_found() {
    let _alone = CPU.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(lab) = lab_with_bbr() else { return };
    let (from, to) = lab.connect().unwrap();
    assert_eq!(pacing(&lab, from, &to), Some(Pacing::CongestionControl("bbr".into())));
    let (from, to) = lab.connect().unwrap();
    // Too late: the handshake has set up BBR's pacing.
    set_tcp_congestion(&from, "reno").unwrap();
    let leftover = Pacing::Leftover { congestion: "reno".into(), earlier: "bbr".into() };
    assert_eq!(pacing(&lab, from, &to), Some(leftover));
    // In time.
    let (from, to) = connect_with(&lab, "reno");
    assert_eq!(pacing(&lab, from, &to), None);
}

#[test]
fn a_socket_without_pacing_is_not_suspected() {
    let _alone = CPU.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error) => return eprintln!("SKIPPED: there is no lab: {error}"),
    };
    for host in [&lab.sender, &lab.receiver] {
        host.set_sysctl("net.ipv4.tcp_congestion_control", "reno").unwrap();
    }
    let (from, to) = lab.connect().unwrap();
    assert_eq!(pacing(&lab, from, &to), None);
    let (from, to) = lab.connect().unwrap();
    haul_sys::sockopt::set_max_pacing_rate(&from, 1_000_000_000).unwrap();
    assert_eq!(pacing(&lab, from, &to), Some(Pacing::MaxRate(1_000_000_000)));
}
