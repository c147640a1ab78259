//! Chooses the source that intercepts the calls of the driver.

use std::sync::{Mutex, PoisonError};

use super::{
    super::{
        devices::Interception,
        recorder::{self, RecordEvents},
    },
    blocks, graphs,
    observer::Observer,
    state,
};
use crate::{
    error::{Error, Kind, Result},
    model::Source,
    sys::{calls, cuda, cupti, dispatch},
};

/// Starts to intercept every allocation, through the requested source, or else the dispatch table, or else CUPTI. Does nothing if
/// allocations are intercepted already.
pub(in crate::source) fn subscribe(requested: Option<Source>) -> Result<Interception> {
    // Two threads must not choose two sources, because each allocation would be counted twice.
    static CHOICE: Mutex<()> = Mutex::new(());
    let _choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(live) = subscribed() {
        return match requested {
            Some(requested) if requested != live.source => {
                Err(Kind::OtherSource { requested: requested.name(), using: live.source.name() }.into())
            }
            _ => Ok(live),
        };
    }
    state::forget_handles();
    blocks::forget_first_block();
    graphs::forget();
    let not_exact = |why| Error::from(Kind::NoGauge { gauge: "exact", why });
    let recorder = recorder::get().ok_or_else(|| not_exact("gpumem has not started to count"))?;
    choose(requested, recorder.subscribe)?;
    subscribed()
        .ok_or_else(|| not_exact("gpumem::intercept::unsubscribe() was called on another thread at the same time"))
}

/// Starts to send the calls that this source intercepts to `R`.
pub(in crate::source) fn subscribe_to<R: RecordEvents>(source: Source) -> Result<()> {
    #[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    super::dry_run::watch();
    if source == Source::Dispatch {
        return dispatch::subscribe::<Observer<R>>();
    }
    // Without a driver there are no calls to intercept, and the error must not blame CUPTI.
    cuda::devices()?;
    cupti::subscribe::<Observer<R>>()
}

/// Returns the source that [`subscribe`] would use.
pub(in crate::source) fn can_subscribe(requested: Option<Source>) -> Result<Source> {
    choose(requested, |source| {
        if source == Source::Dispatch {
            return dispatch::check_available();
        }
        cuda::devices()?;
        cupti::check_available()
    })
}

/// Returns the source for which `attempt` succeeds: the requested one, or else the dispatch table, or else CUPTI.
fn choose(requested: Option<Source>, attempt: impl Fn(Source) -> Result<()>) -> Result<Source> {
    // Without a driver, all sources fail for the same reason.
    cuda::load_for_hooks()?;
    if let Some(requested) = requested {
        return attempt(requested).map(|()| requested);
    }
    let Err(dispatch) = attempt(Source::Dispatch) else { return Ok(Source::Dispatch) };
    match attempt(Source::Cupti) {
        Ok(()) => Ok(Source::Cupti),
        // Without a device, both errors may be the same.
        Err(cupti) if cupti == dispatch => Err(cupti),
        Err(cupti) => Err(Kind::NoSource { dispatch, cupti }.into()),
    }
}

pub(in crate::source) fn unsubscribe() {
    dispatch::unsubscribe();
    cupti::unsubscribe();
}

/// Returns the source that intercepts allocations now.
pub(in crate::source) fn subscribed() -> Option<Interception> {
    let by = |source| move |library| Interception { source, library };
    let dispatch = dispatch::subscribed().map(by(Source::Dispatch));
    dispatch.or_else(|| cupti::subscribed().map(by(Source::Cupti)))
}

/// Records the memory of a device that only the driver knows. Called before a trace starts and at each of its readings.
pub(in crate::source) fn poll(ordinal: u32) {
    calls::as_observer(|| {
        blocks::find_first_block();
        graphs::poll(ordinal);
    });
}
