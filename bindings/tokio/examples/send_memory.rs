//! Sends memory without a copy, if the network device allows.
//!
//!     cargo run -p haul-tokio --example send_memory -- FILE HOST PORT

use haul::LoanOutcome;
use haul_tokio::Stream;
use std::error::Error;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: send_memory FILE HOST PORT");
    let memory = tokio::fs::read(argument()?).await?;
    let socket = tokio::net::TcpStream::connect((argument()?, argument()?.parse()?)).await?;
    let (mut sender, _receiver) = Stream::from_tokio(socket)?.split();
    let mut loans = Vec::new();
    for part in memory.chunks(1 << 20) {
        // The buffer belongs to the kernel until the loan ends.
        loans.push(sender.lend(part.to_vec()).await?);
    }
    let mut copied = 0;
    for loan in loans {
        copied += usize::from(loan.await?.outcome == LoanOutcome::Copied);
    }
    sender.shutdown().await?;
    println!("loans that were copied: {copied}");
    Ok(())
}
