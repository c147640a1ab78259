//! Random values of the types that items consist of. Ids are often equal, so that a reader accepts most items.

use std::time::Duration;

use gpumem_core::model::{
    Bytes, CallsiteId, Device, GpuMemory, Key, PoolId, ScopeId, StackId, ThreadId, ThreadName, Threads,
};

use super::Random;

/// A type with random values. The macros that write and read types implement it for most of them.
pub(crate) trait Any: Sized {
    fn any(random: &mut Random) -> Self;
}

macro_rules! values {
    ($($type:ty as $random:ident => $value:expr;)*) => {$(
        impl Any for $type {
            fn any($random: &mut Random) -> Self {
                $value
            }
        }
    )*};
}
pub(super) use values;

impl<T: Any> Any for Option<T> {
    fn any(random: &mut Random) -> Self {
        random.option(T::any)
    }
}

impl<T: Any> Any for Vec<T> {
    fn any(random: &mut Random) -> Self {
        random.list(T::any)
    }
}

values! {
    bool as random => random.is(2);
    u8 as random => (random.any() & 0xff) as u8;
    CallsiteId as random => CallsiteId(random.few());
    ScopeId as random => ScopeId(random.few().into());
    StackId as random => StackId(random.few());
    PoolId as random => PoolId(Any::any(random));
    ThreadId as random => ThreadId(random.few());
    Device as random => Device { family: Any::any(random), ordinal: random.few() };
    u32 as random => random.small();
    u64 as random => random.any();
    usize as random => usize::try_from(random.any()).unwrap_or(7);
    String as random => random.text();
    Duration as random => Duration::from_nanos(random.any());
    Bytes as random => Bytes::new(random.any());
    Key as random => Key::from_raw(if random.is(4) { random.any() } else { random.below(40) << 20 });
    GpuMemory as random => GpuMemory::new(Any::any(random), Any::any(random), Any::any(random), Any::any(random));
    ThreadName as random => ThreadName::new(random.text().as_bytes());
    Threads as random => Option::any(random).map_or(Threads::Unscoped, Threads::Named);
}
