//! The form of values in a file. The codes and the order of fields of each type are defined here, so that the model can
//! change without changing the format.

use std::time::Duration;

use super::bytes::{Input, Malformed, Result, put_number, put_text};
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Counted, Device, DriverGauge, Family, Gauge, GpuMemory, Key, Label, MemKind, PoolId,
    ScopeId, ScopeSpec, Source, StackId, ThreadId, ThreadName, Threads,
};

/// A value that can be written and read back.
pub(super) trait Wire: Sized {
    fn put(&self, to: &mut Vec<u8>);
    fn get(from: &mut Input<'_>) -> Result<Self>;
}

/// Fields in the order in which they are written. A later version adds fields at the end.
macro_rules! fields {
    ($type:ty { $($field:ident),* }) => {
        impl $crate::wire::Wire for $type {
            fn put(&self, to: &mut Vec<u8>) {
                $($crate::wire::Wire::put(&self.$field, to);)*
            }

            fn get(from: &mut $crate::bytes::Input<'_>) -> $crate::bytes::Result<Self> {
                Ok(Self {
                    $($field: $crate::wire::Wire::get(from)?,)*
                })
            }
        }

        #[cfg(any(test, feature = "testing"))]
        impl $crate::testing::Any for $type {
            fn any(random: &mut $crate::testing::Random) -> Self {
                Self { $($field: $crate::testing::Any::any(random)),* }
            }
        }
    };
}
pub(super) use fields;

/// The values of an enumeration, each written as its discriminant in one byte.
macro_rules! codes {
    ($type:ty { $($variant:ident),* $(,)? }) => {
        impl $crate::wire::Wire for $type {
            fn put(&self, to: &mut Vec<u8>) {
                to.push(*self as u8);
            }

            fn get(from: &mut $crate::bytes::Input<'_>) -> $crate::bytes::Result<Self> {
                match from.byte()? {
                    $(code if code == Self::$variant as u8 => Ok(Self::$variant),)*
                    _ => Err($crate::bytes::Malformed(concat!("a number matches no ", stringify!($type)))),
                }
            }
        }

        #[cfg(any(test, feature = "testing"))]
        impl $crate::testing::Any for $type {
            fn any(random: &mut $crate::testing::Random) -> Self {
                let all = [$(Self::$variant),*];
                all[random.index(all.len())]
            }
        }
    };
}
pub(super) use codes;

codes!(MemKind {
    Device,
    Pool,
    Managed,
    PinnedHost,
    Vmm,
    Graph,
    Part,
    Context,
    Modules,
    LocalMemory,
    Limits,
    Streams,
    ExecutableGraphs,
    PoolCache,
    SharedCalls,
    Earlier,
    NotKnown
});
codes!(Family { Cuda, Simulated, Custom });
codes!(Gauge { Exact, Sampled, Off });
codes!(DriverGauge { Process, Device, AtMost });
codes!(Source { Dispatch, Cupti, Simulation, Sampling, Off, Custom });
codes!(Counted { AllThreads, OwnAndUnscoped, Own, Task });

fields!(Block { device, bytes, kind, context, stack });
fields!(ScopeSpec { device, gauge, every, counts, callsite, source, at_peak });
fields!(Label { name, shape, dtype });

/// The writing and reading code of these types.
macro_rules! plain {
    ($($type:ty: |$value:ident, $to:ident| $put:expr, |$from:ident| $get:expr;)*) => {$(
        impl Wire for $type {
            fn put(&self, $to: &mut Vec<u8>) {
                let $value = self;
                $put;
            }

            fn get($from: &mut Input<'_>) -> Result<Self> {
                $get
            }
        }
    )*};
}

plain! {
    Device: |device, to| {
        device.family.put(to);
        device.ordinal.put(to);
    }, |from| Ok(Self { family: Wire::get(from)?, ordinal: Wire::get(from)? });
    GpuMemory: |memory, to| {
        memory.total.put(to);
        memory.free.put(to);
        memory.used.put(to);
        memory.reserved.put(to);
    }, |from| Ok(Self::new(Wire::get(from)?, Wire::get(from)?, Wire::get(from)?, Wire::get(from)?));
    u8: |number, to| to.push(*number), |from| from.byte();
    u32: |number, to| put_number(to, (*number).into()), |from| from.small();
    u64: |number, to| put_number(to, *number), |from| from.number();
    usize: |number, to| put_number(to, *number as u64), |from| {
        from.number()?.try_into().map_err(|_| Malformed("a number exceeds the range of this machine"))
    };
    bool: |truth, to| to.push((*truth).into()), |from| match from.byte()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed("a truth value is neither 0 nor 1")),
    };
    String: |text, to| put_text(to, text), |from| from.text();
    // The time is in nanoseconds.
    Duration: |time, to| nanoseconds(*time).put(to), |from| from.number().map(Self::from_nanos);
    Bytes: |bytes, to| bytes.get().put(to), |from| from.number().map(Self::new);
    Key: |key, to| key.get().put(to), |from| from.number().map(Self::from_raw);
    PoolId: |id, to| id.0.put(to), |from| Wire::get(from).map(Self);
    CallsiteId: |id, to| id.0.put(to), |from| Wire::get(from).map(Self);
    ScopeId: |id, to| id.0.put(to), |from| Wire::get(from).map(Self);
    StackId: |id, to| id.0.put(to), |from| Wire::get(from).map(Self);
    ThreadId: |id, to| id.0.put(to), |from| Wire::get(from).map(Self);
    // A list of bytes.
    ThreadName: |name, to| name.bytes().to_vec().put(to), |from| Vec::get(from).map(|bytes: Vec<u8>| Self::new(&bytes));
    // An optional name.
    Threads: |threads, to| if let Self::Named(name) = threads { Some(*name) } else { None }.put(to), |from| {
        Ok(Option::get(from)?.map_or(Self::Unscoped, Self::Named))
    };
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.is_some().put(to);
        if let Some(value) = self {
            value.put(to);
        }
    }

    fn get(from: &mut Input<'_>) -> Result<Self> {
        if bool::get(from)? { T::get(from).map(Some) } else { Ok(None) }
    }
}

/// The length comes first. Each element takes at least a byte, so an excessive length is detected before memory is
/// reserved.
impl<T: Wire> Wire for Vec<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.len().put(to);
        for value in self {
            value.put(to);
        }
    }

    fn get(from: &mut Input<'_>) -> Result<Self> {
        let length = usize::get(from)?;
        if length > from.len() {
            return Err(Malformed("a list is longer than its item"));
        }
        (0..length).map(|_| T::get(from)).collect()
    }
}

/// 584 years fit into 64 bits.
#[inline]
pub(super) fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}
