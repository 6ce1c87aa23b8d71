//! An axum server whose bodies are files, sent by `sendfile`.
//!
//!     cargo run -p haul-tokio --example axum_files -- 127.0.0.1:8000 FOLDER
//!     curl http://127.0.0.1:8000/FILE
//!     curl http://127.0.0.1:8000/sent

mod http;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::routing::get;
use axum::serve::Listener;
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Accepts connections that send files by `sendfile`.
struct FileListener(tokio::net::TcpListener);

impl Listener for FileListener {
    type Io = http::FileStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let accepted = self.0.accept().await;
            match accepted
                .and_then(|(socket, address)| Ok((http::FileStream::new(socket)?, address)))
            {
                Ok(accepted) => return accepted,
                Err(error) => {
                    eprintln!("{error}");
                    // There may be no descriptor for a while.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(root)) = (arguments.next(), arguments.next()) else {
        return Err("usage: axum_files ADDRESS FOLDER".into());
    };
    let app = Router::new()
        .route("/sent", get(async || format!("{}\n", http::file_bytes_sent())))
        .fallback(respond)
        .with_state(Arc::new(PathBuf::from(root)));
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(FileListener(listener), app).await?;
    Ok(())
}

async fn respond(State(root): State<Arc<PathBuf>>, uri: Uri) -> Result<Body, StatusCode> {
    let (file, len) = http::open(&root, uri.path()).await.ok_or(StatusCode::NOT_FOUND)?;
    let bytes = http::file_bytes(file, 0..len).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Body::from(bytes))
}
