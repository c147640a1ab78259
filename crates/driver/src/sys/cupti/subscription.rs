//! The subscription of this process.

use std::sync::{Mutex, PoisonError};

use super::{
    abi::{
        CUPTI_ERROR_INVALID_PARAMETER, DOMAIN_DRIVER_API, DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROY_STARTING,
        Subscriber,
    },
    decode::callback,
    library::cupti,
};
use crate::{
    error::Error,
    sys::calls::{CALLS, Observe},
};

/// CUPTI 11.2, the first version that reports stream-ordered memory, knows all functions with numbers below this one. A function with a
/// higher number is skipped if CUPTI does not know it: a program that was built with the same toolkit does not call it.
const FIRST_OPTIONAL_NUMBER: u32 = 618;

/// A live subscription.
struct LiveSubscriber(Subscriber);

// SAFETY: the handle is a token that CUPTI returned; CUPTI's functions may be called with it from any thread.
unsafe impl Send for LiveSubscriber {}

static CURRENT: Mutex<Option<LiveSubscriber>> = Mutex::new(None);

/// Starts to send each call to `O`, on the thread that makes it. A call that `O` makes itself is
/// [`Call::Uncounted`](crate::sys::calls::Call::Uncounted), except in [`as_program`](crate::sys::calls::as_program). Does nothing if there
/// is a subscription already.
#[doc(alias("cuptiSubscribe", "cuptiEnableCallback"))]
pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if current.is_some() {
        return Ok(());
    }
    let cupti = cupti()?;
    let subscriber = cupti.new_subscriber(callback::<O>)?;
    let driver = CALLS.iter().filter(|(number, ..)| *number != 0).map(|(number, ..)| (DOMAIN_DRIVER_API, *number));
    for (domain, number) in driver.chain([(DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROY_STARTING)]) {
        // SAFETY: the subscriber is live and the numbers are CUPTI's own.
        let enabled = unsafe { (cupti.enable_callback)(1, subscriber, domain, number) };
        if enabled == CUPTI_ERROR_INVALID_PARAMETER && number >= FIRST_OPTIONAL_NUMBER {
            continue;
        }
        if let Err(error) = cupti.check("cuptiEnableCallback", enabled) {
            // SAFETY: the subscriber is live and not used after this.
            unsafe { (cupti.unsubscribe)(subscriber) };
            return Err(error);
        }
    }
    *current = Some(LiveSubscriber(subscriber));
    Ok(())
}

/// Ends the subscription, so that another tool can subscribe. If there is none, this does nothing and does not load the library.
#[doc(alias = "cuptiUnsubscribe")]
pub(crate) fn unsubscribe() {
    // CUPTI waits for callbacks, which may ask whether there is a subscription. Therefore the lock is released first.
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(LiveSubscriber(subscriber)) = current else { return };
    if let Ok(cupti) = cupti() {
        // SAFETY: the subscriber was live until here and is not used again.
        unsafe { (cupti.unsubscribe)(subscriber) };
    }
}

/// Returns the path of the library, if there is a subscription.
pub(crate) fn subscribed() -> Option<&'static str> {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    current.as_ref().and_then(|_| cupti().ok()).map(|cupti| cupti.path.as_str())
}
