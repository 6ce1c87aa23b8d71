//! Sends a file, by `sendfile`.
//!
//!     cargo run -p haul-tokio --example tokio_send_file -- FILE HOST PORT

use haul_tokio::{FilePolicy, Stream};
use std::error::Error;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: tokio_send_file FILE HOST PORT");
    let file = std::fs::File::open(argument()?)?;
    let len = haul::file_len(&file)?;
    let socket = tokio::net::TcpStream::connect((argument()?, argument()?.parse()?)).await?;
    let (mut sender, _receiver) = Stream::from_tokio(socket)?.split();
    // A thread reads what is not in memory, so that other tasks do not wait for the disk.
    sender.send_file(&file, 0..len, FilePolicy::Prefetch).await?;
    sender.shutdown().await?;
    println!("{:?}", sender.report().files);
    Ok(())
}
