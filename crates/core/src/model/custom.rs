//! Custom gauges: functions of the program that return how many bytes are in use.

use std::{fmt, sync::Arc};

use super::{Bytes, Gauge};

/// A gauge of the program, from [`Gauge::custom`].
#[derive(Clone)]
pub struct CustomGauge {
    name: String,
    read: Arc<ReadInUse>,
}

type ReadInUse = dyn Fn() -> Result<Bytes, String> + Send + Sync;

impl CustomGauge {
    /// Returns the name of the gauge.
    #[doc(hidden)]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Calls the function of the gauge. Panics if that function panics.
    #[doc(hidden)]
    pub fn read(&self) -> Result<Bytes, String> {
        (self.read)()
    }
}

impl fmt::Debug for CustomGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomGauge").field(&self.name).finish()
    }
}

impl Gauge {
    /// A gauge of the program, for `gpumem::gauge::set_gauge`: `read` returns how many bytes are in use, as a `u64` or as [`Bytes`], in an
    /// `Option` or a `Result` if this may not be known.
    ///
    /// `read` is called at the start and at each reading of a trace, and every millisecond (`GPUMEM_SAMPLE_MS`) on a thread of
    /// gpumem while a trace is open. A trace waits for `read` to return. `read` must not read traces itself; that returns an
    /// error. If `read` panics, it is not called again.
    ///
    /// ```
    /// use gpumem::{Bytes, Gauge};
    ///
    /// let always = Gauge::custom("metal", || Bytes::mib(64));
    /// let maybe = Gauge::custom("wgpu", || Some(1_u64 << 20)); // `None` prints `?`
    /// # drop((always, maybe));
    /// ```
    pub fn custom<R: InUse>(name: impl Into<String>, read: impl Fn() -> R + Send + Sync + 'static) -> CustomGauge {
        CustomGauge { name: name.into(), read: Arc::new(move || read().in_use()) }
    }
}

/// The types that the function of a [custom gauge](Gauge::custom) may return.
pub trait InUse {
    /// Returns the bytes in use, or the reason why the number is not known.
    ///
    /// # Errors
    /// Returns an error if the number is not known.
    fn in_use(self) -> Result<Bytes, String>;
}

impl InUse for Bytes {
    fn in_use(self) -> Result<Bytes, String> {
        Ok(self)
    }
}

impl InUse for u64 {
    fn in_use(self) -> Result<Bytes, String> {
        Ok(Bytes::new(self))
    }
}

impl<T: InUse> InUse for Option<T> {
    fn in_use(self) -> Result<Bytes, String> {
        self.map_or_else(|| Err("its function returned None".to_owned()), T::in_use)
    }
}

impl<T: InUse, E: fmt::Display> InUse for Result<T, E> {
    fn in_use(self) -> Result<Bytes, String> {
        self.map_or_else(|error| Err(error.to_string()), T::in_use)
    }
}
