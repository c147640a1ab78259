//! Futures for the tests.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll},
};

/// A future that is pending at its first poll only.
#[derive(Debug, Default)]
pub struct Yield(bool);

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        context.waker().wake_by_ref();
        if mem::replace(&mut self.0, true) { Poll::Ready(()) } else { Poll::Pending }
    }
}
