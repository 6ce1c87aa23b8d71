//! Receives a file until the connection ends.
//!
//!     cargo run -p haul-tokio --example tokio_receive_file -- FILE HOST PORT

use haul_tokio::Stream;
use std::error::Error;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: tokio_receive_file FILE HOST PORT");
    let file = std::fs::File::create(argument()?)?;
    let socket = tokio::net::TcpStream::connect((argument()?, argument()?.parse()?)).await?;
    let (_sender, mut receiver) = Stream::from_tokio(socket)?.split();
    let mut position = 0;
    loop {
        match receiver.receive_into_file(&file, position..position + (1 << 30)).await? {
            0 => break,
            received => position += received,
        }
    }
    println!("{:?}", receiver.report());
    Ok(())
}
