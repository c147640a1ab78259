//! Which source intercepts the calls of the driver.

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
#[cfg(all(feature = "__internal", feature = "dispatch"))]
use crate::sys::calls::{Call, Caller, Observe};
use crate::{
    error::{Error, Kind, Result},
    model::Source,
    sys::{calls, cuda},
};

/// Intercepts every allocation from now on, unless this is already the case: through the wanted source, else through the dispatch
/// table, else through CUPTI.
pub(in crate::source) fn subscribe(wanted: Option<Source>) -> Result<Interception> {
    // Two threads must not choose two sources, because each allocation would be counted twice.
    static CHOICE: Mutex<()> = Mutex::new(());
    let _choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(live) = subscribed() {
        return match wanted {
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
    let recorder = recorder::get().ok_or_else(|| not_exact("gpumem has not begun to count"))?;
    choose(wanted, recorder.subscribe)?;
    subscribed().ok_or_else(|| not_exact("gpumem::intercept::unsubscribe() was called on another thread meanwhile"))
}

/// From now on the calls that this source intercepts are recorded to `R`.
pub(in crate::source) fn subscribe_to<R: RecordEvents>(source: Source) -> Result<()> {
    match source {
        Source::Dispatch => by_dispatch::subscribe::<Observer<R>>(),
        _ => by_cupti::subscribe::<Observer<R>>(),
    }
}

/// The source that [`subscribe`] would use.
pub(in crate::source) fn can_subscribe(wanted: Option<Source>) -> Result<Source> {
    choose(wanted, |source| match source {
        Source::Dispatch => by_dispatch::check_available(),
        _ => by_cupti::check_available(),
    })
}

/// The source with which `attempt` succeeds: the wanted one, else the dispatch table, else CUPTI.
fn choose(wanted: Option<Source>, attempt: impl Fn(Source) -> Result<()>) -> Result<Source> {
    // Without a driver there is one reason for all sources.
    cuda::load_for_hooks()?;
    if let Some(wanted) = wanted {
        return attempt(wanted).map(|()| wanted);
    }
    let Err(dispatch) = attempt(Source::Dispatch) else { return Ok(Source::Dispatch) };
    match attempt(Source::Cupti) {
        Ok(()) => Ok(Source::Cupti),
        // Without a device both reasons may be the same.
        Err(cupti) if cupti == dispatch => Err(cupti),
        Err(cupti) => Err(Kind::NoSource { dispatch, cupti }.into()),
    }
}

/// The version of CUPTI, if it can be used.
pub(in crate::source) fn cupti_version() -> Option<u32> {
    by_cupti::version()
}

pub(in crate::source) fn unsubscribe() {
    by_dispatch::unsubscribe();
    by_cupti::unsubscribe();
}

/// The source that intercepts allocations now.
pub(in crate::source) fn subscribed() -> Option<Interception> {
    let by = |source| move |library| Interception { source, library };
    let dispatch = by_dispatch::subscribed().map(by(Source::Dispatch));
    dispatch.or_else(|| by_cupti::subscribed().map(by(Source::Cupti)))
}

#[cfg(feature = "dispatch")]
mod by_dispatch {
    use crate::{
        error::Result,
        sys::{calls::Observe, dispatch},
    };

    pub(super) use dispatch::{check_available, subscribed, unsubscribe};

    pub(super) fn subscribe<O: Observe>() -> Result<()> {
        dispatch::subscribe::<O>()
    }
}

#[cfg(feature = "cupti")]
mod by_cupti {
    use crate::{
        error::Result,
        sys::{calls::Observe, cuda, cupti},
    };

    pub(super) use cupti::{subscribed, unsubscribe, version};

    pub(super) fn subscribe<O: Observe>() -> Result<()> {
        // Without a driver there is nothing to intercept, and the error must not blame CUPTI.
        cuda::devices()?;
        cupti::subscribe::<O>()
    }

    pub(super) fn check_available() -> Result<()> {
        cuda::devices()?;
        cupti::check_available()
    }
}

/// Stands for a source that this build does not have.
#[cfg(not(all(feature = "cupti", feature = "dispatch")))]
macro_rules! absent {
    ($module:ident, $feature:literal) => {
        mod $module {
            use crate::{
                error::{Kind, Result},
                sys::calls::Observe,
            };

            pub(super) fn subscribe<O: Observe>() -> Result<()> {
                check_available()
            }

            pub(super) fn check_available() -> Result<()> {
                Err(Kind::NotBuilt { feature: $feature }.into())
            }

            #[allow(dead_code, reason = "only CUPTI has one")]
            pub(super) fn version() -> Option<u32> {
                None
            }

            pub(super) fn unsubscribe() {}

            pub(super) fn subscribed() -> Option<&'static str> {
                None
            }
        }
    };
}
#[cfg(not(feature = "cupti"))]
absent!(by_cupti, "cupti");
#[cfg(not(feature = "dispatch"))]
absent!(by_dispatch, "dispatch");

/// The functions of the driver that are intercepted. A driver need not have all of them.
#[cfg(all(feature = "__internal", feature = "dispatch"))]
pub(crate) fn intercepted() -> Vec<&'static str> {
    calls::names().collect()
}

/// For benchmarks: hooks in the dispatch table that record nothing.
#[cfg(all(feature = "__internal", feature = "dispatch"))]
pub(crate) fn hook_for_nobody() -> Result<()> {
    struct RecordNothing;

    impl Observe for RecordNothing {
        #[inline]
        fn pooled(_: &Caller, _: u64, _: u64, _: u64) {}

        #[inline]
        fn freeing(_: &Caller, _: u64) {}

        fn other(_: &Caller, _: &Call) {}
    }

    crate::sys::dispatch::subscribe::<RecordNothing>()
}

/// For benchmarks: a pair of stream-ordered calls on a stream of device 0, recorded to `R` by the hooks, and the same without hooks.
#[cfg(all(feature = "__internal", feature = "dispatch"))]
pub(crate) fn rehearse<R: RecordEvents>() -> [fn(u64); 2] {
    use crate::sys::dispatch::rehearsal;

    const STREAM: u64 = 0x9900;
    state::state().streams.insert(STREAM, 0);
    rehearsal::begin();
    [|bytes| rehearsal::pair::<Observer<R>>(STREAM, bytes), |bytes| rehearsal::bare_pair(STREAM, bytes)]
}

/// Records what only the driver knows about a device. It is called before a trace begins and at each of its readings.
pub(in crate::source) fn poll(ordinal: u32) {
    calls::as_observer(|| {
        blocks::find_first_block();
        graphs::poll(ordinal);
    });
}
