//! Sends memory without a copy, if the network device allows.
//!
//!     cargo run -p haul-tokio --example tokio_send_memory -- FILE HOST PORT

use haul_tokio::Stream;
use haul_tokio::haul::{Buffer, LoanOutcome};
use std::error::Error;
use std::sync::Arc;

/// A loan has a limit of 16 MiB.
const LOAN_BYTES: usize = 1 << 20;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: tokio_send_memory FILE HOST PORT");
    let memory = Arc::new(tokio::fs::read(argument()?).await?);
    let socket = tokio::net::TcpStream::connect((argument()?, argument()?.parse()?)).await?;
    let (mut sender, _receiver) = Stream::from_tokio(socket)?.split();
    let mut loans = Vec::new();
    for start in (0..memory.len()).step_by(LOAN_BYTES) {
        let end = memory.len().min(start + LOAN_BYTES);
        // The kernel sends the shared memory itself, which lives until the loan ends.
        loans.push(sender.lend(Buffer::shared(Arc::clone(&memory)).slice(start..end)?).await?);
    }
    let mut copied = 0;
    for loan in loans {
        copied += usize::from(loan.await?.outcome == LoanOutcome::Copied);
    }
    sender.shutdown().await?;
    println!("loans that were copied: {copied}");
    Ok(())
}
