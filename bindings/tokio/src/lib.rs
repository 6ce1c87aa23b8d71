//! [`haul`] for tokio: files, loans and forwarding without copies.
//!
//! A [`Stream`] owns a TCP or Unix socket outside of tokio's reactor. The completion of a loan
//! raises `EPOLLERR` on the socket, which tokio takes for the end of the connection. So the socket
//! is in a private epoll set, and tokio watches the descriptor of this set.
//!
//! ```no_run
//! # async fn example(socket: tokio::net::TcpStream, file: std::fs::File) -> std::io::Result<()> {
//! use haul_tokio::{FilePolicy, Stream};
//! let (mut sender, _receiver) = Stream::from_tokio(socket)?.split();
//! sender.send_file(&file, 0..file.metadata()?.len(), FilePolicy::Prefetch).await?;
//! let loan = sender.lend(vec![7; 1 << 20]).await?;
//! let returned = loan.await?; // the kernel released the buffer
//! # drop(returned);
//! # Ok(())
//! # }
//! ```
//!
//! Every future can be dropped at any time: a loan continues without its future, and a part of a
//! message that was sent is stated by [`SendHalf::position`].

#![deny(unsafe_code)]

mod connection;
mod epoll_set;
mod error;
mod forward;
mod loan;
mod reactor;
mod receiver;
mod sender;
mod stream;

pub use error::LendError;
pub use forward::forward;
pub use loan::Loan;
pub use receiver::RecvHalf;
pub use sender::{FilePolicy, SendHalf};
pub use stream::Stream;

/// The library, for its settings, buffers, pools and reports.
pub use haul;
