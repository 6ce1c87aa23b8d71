//! An HTTP server by hyper whose bodies are files, sent by `sendfile`.
//!
//!     cargo run -p haul-tokio --example hyper_files -- 127.0.0.1:8000 FOLDER
//!     curl http://127.0.0.1:8000/FILE
//!     curl http://127.0.0.1:8000/sent

mod http;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(root)) = (arguments.next(), arguments.next()) else {
        return Err("usage: hyper_files ADDRESS FOLDER".into());
    };
    let root = Arc::new(PathBuf::from(root));
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (socket, _) = listener.accept().await?;
        let root = Arc::clone(&root);
        let service = service_fn(move |request| respond(Arc::clone(&root), request));
        tokio::spawn(async move {
            let stream = http::FileStream::new(socket)?;
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            connection.await.inspect_err(|error| eprintln!("{error}"))?;
            Ok::<_, Box<dyn Error + Send + Sync>>(())
        });
    }
}

async fn respond(
    root: Arc<PathBuf>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    if path == "/sent" {
        return Ok(Response::new(format!("{}\n", http::file_bytes_sent()).into()));
    }
    let body = match http::open(&root, path).await {
        Some((file, len)) => http::file_bytes(file, 0..len).ok(),
        None => None,
    };
    Ok(body.map_or_else(
        || {
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::NOT_FOUND;
            response
        },
        |body| Response::new(Full::new(body)),
    ))
}
