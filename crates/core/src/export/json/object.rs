//! The entries of a report as a JSON object. Every program with gpumem builds this, so there are no derive macros.

use std::time::Duration;

use serde_core::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    model::{ByteDelta, Bytes, Gauge, MemKind, Source},
    report::PartKind,
};

/// Defines the entries of an object: `name` for a field, `name: expression` for another value. The last entry may be `; unless_empty
/// name`, which is left out if the list is empty. Before it may come `; flatten value`, which adds the entries of `value`.
macro_rules! object {
    (
        $type:ty as $value:ident $(for any $parameter:ident)? {
            $($name:ident $(: $entry:expr)?),* $(,)?
            $(; flatten $inner:expr)?
            $(; unless_empty $list:ident)?
        }
    ) => {
        impl $(<$parameter: serde_core::Serialize>)? $type {
            /// Writes the entries of the object, in order.
            pub(in crate::export::json) fn entries<M: serde_core::ser::SerializeMap>(
                &self,
                map: &mut M,
            ) -> Result<(), M::Error> {
                use $crate::export::json::object::entry;
                let $value = self;
                $(map.serialize_entry(stringify!($name), &entry!($value, $name $(, $entry)?))?;)*
                $($inner.entries(map)?;)?
                $(if !$value.$list.is_empty() {
                    map.serialize_entry(stringify!($list), &$value.$list)?;
                })?
                Ok(())
            }
        }

        impl $(<$parameter: serde_core::Serialize>)? serde_core::Serialize for $type {
            fn serialize<S: serde_core::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let mut map = to.serialize_map(None)?;
                self.entries(&mut map)?;
                serde_core::ser::SerializeMap::end(map)
            }
        }
    };
}
pub(super) use object;

macro_rules! entry {
    ($value:ident, $name:ident) => {
        $value.$name
    };
    ($value:ident, $name:ident, $entry:expr) => {
        $entry
    };
}
pub(super) use entry;

/// Returns the time for an entry `…_us`. `Duration` itself would be written as seconds and nanoseconds.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Values that are one number or one string.
macro_rules! plain {
    ($($type:ty as $value:ident => $written:expr;)*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let $value = self;
                $written.serialize(to)
            }
        }
    )*};
}

plain! {
    Bytes as bytes => bytes.get();
    ByteDelta as bytes => bytes.get();
    Gauge as gauge => gauge.name();
    MemKind as kind => kind.name();
    Source as source => source.name();
    PartKind as kind => match kind {
        PartKind::Others => "others",
        PartKind::Scope => "scope",
        PartKind::Library => "library",
        PartKind::PoolCache => "pool_cache",
        PartKind::RegisteredPool => "registered_pool",
        PartKind::Driver => "driver",
        PartKind::Unknown => "unknown",
    };
}

/// Settings that are read from JSON contain amounts, such as the limit of an estimate.
impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        u64::deserialize(from).map(Self::new)
    }
}
