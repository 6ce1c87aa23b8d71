//! [`Loan`]: a future of a lent buffer.

use crate::connection::Connection;
use haul::{LoanId, Returned};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A future of a lent buffer, which the kernel may still use.
///
/// If the future is dropped, the loan continues, and the buffer is dropped after the loan ended, by
/// a thread of the runtime. The future keeps the socket open.
#[derive(Debug)]
#[must_use = "the buffer comes back through this future"]
pub struct Loan {
    id: LoanId,
    connection: Arc<Connection>,
}

impl Loan {
    pub(crate) fn new(id: LoanId, connection: Arc<Connection>) -> Self {
        Self { id, connection }
    }

    /// The identifier of the loan.
    pub fn id(&self) -> LoanId {
        self.id
    }
}

impl Future for Loan {
    /// An error of the socket does not end a loan: the kernel releases the buffer, and
    /// [`Returned::sent_bytes`] states how many bytes the socket accepted.
    type Output = io::Result<Returned>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.connection.poll_loan(context, self.id)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // A buffer that came back is dropped outside of the lock.
        let returned = self.connection.with_lender(|lender| lender.forget(self.id));
        drop(returned);
    }
}
