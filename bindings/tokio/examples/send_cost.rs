//! Sends a file over TCP in one of three ways, for a comparison of their cost.
//!
//!     cargo run --release -p haul-tokio --example send_cost -- tokio|copy|blocking \
//!         [FILE_MIB] [TIMES] [HOST:PORT]
//!
//! Without HOST:PORT, a thread of the program receives over loopback. Compare two ways in the same
//! minutes by `haul soak`:
//!
//!     haul soak --runs 9 --bytes 2560MiB --versus "send_cost copy" -- send_cost tokio

use haul_tokio::{FilePolicy, Stream};
use rustix::net::sockopt;
use std::error::Error;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;

const CHUNK: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize| arguments.get(at).map(String::as_str);
    let way = argument(0).ok_or("usage: send_cost tokio|copy|blocking [FILE_MIB] [TIMES]")?;
    let mib: usize = argument(1).unwrap_or("256").parse()?;
    let times: usize = argument(2).unwrap_or("10").parse()?;
    let mut file = tempfile::tempfile()?;
    let chunk: Vec<u8> = (0..CHUNK).map(|at| ((at * 31) >> 3) as u8).collect();
    for _ in 0..mib {
        file.write_all(&chunk)?;
    }
    let (address, receiving) = match argument(3) {
        Some(address) => (address.parse()?, None),
        None => start_receiver().map(|(address, receiving)| (address, Some(receiving)))?,
    };
    let socket = connect_without_pacing(address)?;
    let len = (mib * CHUNK) as u64;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match way {
        "tokio" => runtime.block_on(send_by_haul(socket, &file, len, times))?,
        "copy" => runtime.block_on(copy(socket, file, times))?,
        "blocking" => {
            let mut sender = haul::Sender::new(socket)?;
            for _ in 0..times {
                sender.send_file_all(&file, 0..len)?;
            }
        }
        other => return Err(format!("{other}: not one of tokio, copy, blocking").into()),
    }
    if let Some(receiving) = receiving {
        receiving.join().map_err(|_| "the receiver failed")?;
    }
    Ok(())
}

async fn send_by_haul(
    socket: TcpStream,
    file: &File,
    len: u64,
    times: usize,
) -> Result<(), Box<dyn Error>> {
    let (mut sender, _receiver) = Stream::from_std(socket)?.split();
    for _ in 0..times {
        sender.send_file(file, 0..len, FilePolicy::Prefetch).await?;
    }
    sender.shutdown().await?;
    Ok(())
}

async fn copy(socket: TcpStream, file: File, times: usize) -> Result<(), Box<dyn Error>> {
    socket.set_nonblocking(true)?;
    let mut socket = tokio::net::TcpStream::from_std(socket)?;
    for _ in 0..times {
        (&file).rewind()?;
        let mut file = tokio::fs::File::from_std(file.try_clone()?);
        tokio::io::copy(&mut file, &mut socket).await?;
    }
    Ok(())
}

/// Starts a thread that receives from one connection and discards the bytes.
fn start_receiver() -> io::Result<(SocketAddr, thread::JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let receiving = thread::spawn(move || {
        let Ok((socket, _)) = listener.accept() else { return };
        let Ok(mut receiver) = haul::Receiver::new(socket) else { return };
        // The kernel discards the bytes without a copy, so that the sender counts.
        while receiver.discard(CHUNK as u64).is_ok_and(|bytes| bytes > 0) {}
    });
    Ok((address, receiving))
}

/// The system's congestion control may pace, which costs CPU time (BBR).
fn connect_without_pacing(address: SocketAddr) -> io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketType};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
    sockopt::set_tcp_congestion(socket.as_fd(), "reno")?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket.into())
}
