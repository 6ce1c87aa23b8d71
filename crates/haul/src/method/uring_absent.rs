//! The io_uring methods of a build without the feature `uring`: each falls back.

use super::{Copying, Entry, SendMethod};
use crate::error::Error;

const ABSENT: &str = "this program was built without haul's feature uring";

pub(super) const SEND: Entry = Entry {
    name: "uring-send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadSend),
    attach: |_, _| Err(Error::Unsupported(ABSENT)),
};

pub(super) const ZEROCOPY: Entry = Entry {
    name: "uring-zerocopy",
    copying: Copying::ReportedByKernel,
    fallback: Some(SendMethod::Zerocopy),
    attach: |_, _| Err(Error::Unsupported(ABSENT)),
};

pub(super) const CHAIN: Entry = Entry {
    name: "uring-chain",
    copying: Copying::Always,
    fallback: Some(SendMethod::UringSend),
    attach: |_, _| Err(Error::Unsupported(ABSENT)),
};
