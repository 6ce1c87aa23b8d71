//! What a transfer needs, apart from the byte streams.

use crate::direct::{DirectRequest, DirectStreams};
use crate::options::Options;
use crate::progress::Progress;

/// What a transfer needs, apart from the byte streams.
pub struct Setup {
    pub options: Options,
    pub direct: Option<DirectStreams>,
    /// The connections of a chain; `None` for a destination that is not part of a chain.
    pub chain: Option<DirectRequest>,
    /// Called with the path of each file that is sent or received, below the root of the transfer.
    pub on_file: OnFile,
    /// How far the transfer is.
    pub progress: Progress,
    /// Ends the byte streams.
    pub abort: Box<dyn FnOnce() + Send>,
}

/// Called with the path of a file.
pub type OnFile = Box<dyn Fn(&[u8]) + Send + Sync>;
