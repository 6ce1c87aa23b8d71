//! The calls whose errors the library reports.

use std::fmt;

/// The system call or operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// `ioctl SIOCOUTQ`.
    BytesToSend,
    /// `recvmsg MSG_ERRQUEUE`.
    ErrorQueue,
    /// `fcntl`.
    Fcntl,
    /// `fstat`.
    Fstat,
    /// `getsockopt SO_ACCEPTCONN`.
    GetAcceptconn,
    /// `getsockopt SO_ERROR`.
    GetError,
    /// `getsockopt SO_RCVTIMEO`.
    GetRcvtimeo,
    /// `getsockopt TCP_ZEROCOPY_RECEIVE`.
    GetTcpZerocopyReceive,
    /// `getsockopt SO_TYPE`.
    GetType,
    /// `getsockopt SO_ZEROCOPY`.
    GetZerocopy,
    /// `getsockopt`.
    Getsockopt,
    /// `mmap of the socket`.
    MapSocket,
    /// `mmap`.
    Mmap,
    /// `pipe2`.
    Pipe,
    /// `poll`.
    Poll,
    /// `pread`.
    Pread,
    /// `pwrite`.
    Pwrite,
    /// `read from the pipe`.
    ReadPipe,
    /// `recv`.
    Recv,
    /// `recv MSG_PEEK`.
    RecvPeek,
    /// `recv MSG_TRUNC`.
    RecvTrunc,
    /// `send`.
    Send,
    /// `send MSG_ZEROCOPY`.
    SendZerocopy,
    /// `sendfile`.
    Sendfile,
    /// `setsockopt SO_ZEROCOPY`.
    SetZerocopy,
    /// `shutdown`.
    Shutdown,
    /// `splice`.
    Splice,
    /// `splice from the socket`.
    SpliceFromSocket,
    /// `splice from a socket`.
    SpliceFromSource,
    /// `splice into the file`.
    SpliceIntoFile,
    /// `splice into a socket`.
    SpliceIntoSocket,
    /// `vmsplice`.
    Vmsplice,
    /// `write`.
    Write,
}

impl Call {
    /// Whether `EAGAIN` of the call means that the socket is not ready.
    pub(crate) fn waits_for_socket(self) -> bool {
        matches!(
            self,
            Self::ErrorQueue
                | Self::Recv
                | Self::RecvPeek
                | Self::RecvTrunc
                | Self::Send
                | Self::SendZerocopy
                | Self::Sendfile
                | Self::Splice
                | Self::SpliceFromSocket
                | Self::SpliceFromSource
                | Self::SpliceIntoFile
                | Self::SpliceIntoSocket
                | Self::Write
        )
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::BytesToSend => "ioctl SIOCOUTQ",
            Self::ErrorQueue => "recvmsg MSG_ERRQUEUE",
            Self::Fcntl => "fcntl",
            Self::Fstat => "fstat",
            Self::GetAcceptconn => "getsockopt SO_ACCEPTCONN",
            Self::GetError => "getsockopt SO_ERROR",
            Self::GetRcvtimeo => "getsockopt SO_RCVTIMEO",
            Self::GetTcpZerocopyReceive => "getsockopt TCP_ZEROCOPY_RECEIVE",
            Self::GetType => "getsockopt SO_TYPE",
            Self::GetZerocopy => "getsockopt SO_ZEROCOPY",
            Self::Getsockopt => "getsockopt",
            Self::MapSocket => "mmap of the socket",
            Self::Mmap => "mmap",
            Self::Pipe => "pipe2",
            Self::Poll => "poll",
            Self::Pread => "pread",
            Self::Pwrite => "pwrite",
            Self::ReadPipe => "read from the pipe",
            Self::Recv => "recv",
            Self::RecvPeek => "recv MSG_PEEK",
            Self::RecvTrunc => "recv MSG_TRUNC",
            Self::Send => "send",
            Self::SendZerocopy => "send MSG_ZEROCOPY",
            Self::Sendfile => "sendfile",
            Self::SetZerocopy => "setsockopt SO_ZEROCOPY",
            Self::Shutdown => "shutdown",
            Self::Splice => "splice",
            Self::SpliceFromSocket => "splice from the socket",
            Self::SpliceFromSource => "splice from a socket",
            Self::SpliceIntoFile => "splice into the file",
            Self::SpliceIntoSocket => "splice into a socket",
            Self::Vmsplice => "vmsplice",
            Self::Write => "write",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
