//! Relays each client to a host: bulk data is spliced, small messages are copied.
//!
//!     cargo run -p haul-tokio --example tokio_relay -- LISTEN_PORT HOST PORT

use haul::{ForwardPool, ForwardSettings};
use std::error::Error;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: tokio_relay LISTEN_PORT HOST PORT");
    let listener = TcpListener::bind(("127.0.0.1", argument()?.parse()?)).await?;
    let server: (String, u16) = (argument()?, argument()?.parse()?);
    let settings = ForwardSettings::default().with_idle_timeout(Some(Duration::from_secs(60)));
    let pool = ForwardPool::with_settings(settings)?;
    println!("listening at {}", listener.local_addr()?);
    loop {
        let (client, _) = listener.accept().await?;
        let (server, pool) = (server.clone(), pool.clone());
        tokio::spawn(async move {
            let server = TcpStream::connect(server).await?.into_std()?;
            let report = haul_tokio::forward(client.into_std()?, server, pool).await;
            match report {
                Ok(report) => println!("{report:?}"),
                Err(error) => eprintln!("relaying: {error}"),
            }
            Ok::<_, std::io::Error>(())
        });
    }
}
