//! The entries of a report as a JSON object. `Serialize` is not used: the feature `serde` derives it with other names, and its
//! derive macro would add two crates to every program.

use std::time::Duration;

use serde_core::{Serialize, Serializer, ser::SerializeMap};

use crate::model::{ByteDelta, Bytes, MemKind};

/// A value that can be written as JSON.
pub(in crate::export) trait Json {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error>;
}

/// A value that is an object.
pub(super) trait Object {
    /// Writes the entries of the object, in order.
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

/// Passes a value to a serializer.
pub(super) struct AsJson<'a, T: ?Sized>(pub(super) &'a T);

impl<T: Json + ?Sized> Serialize for AsJson<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.write(to)
    }
}

/// Defines the entries of an object: `name` for a field, `name: expression` for another value. The last entry may be `; unless_empty
/// name: list`, which is left out if the list is empty, or `; flatten value`, which adds the entries of `value`.
macro_rules! object {
    (
        $type:ty as $value:ident $(for any $parameter:ident)? {
            $($name:ident $(: $entry:expr)?),* $(,)?
            $(; unless_empty $list_name:ident: $list:expr)?
            $(; flatten $inner:expr)?
        }
    ) => {
        impl $(<$parameter: $crate::export::json::object::Json>)? $crate::export::json::object::Object for $type {
            fn entries<M: serde_core::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                use $crate::export::json::object::{AsJson, entry};
                let $value = self;
                $(map.serialize_entry(stringify!($name), &AsJson(&entry!($value, $name $(, $entry)?)))?;)*
                $(if !$list.is_empty() {
                    map.serialize_entry(stringify!($list_name), &AsJson(&$list))?;
                })?
                $($crate::export::json::object::Object::entries(&$inner, map)?;)?
                Ok(())
            }
        }

        impl $(<$parameter: $crate::export::json::object::Json>)? $crate::export::json::object::Json for $type {
            fn write<S: serde_core::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                use serde_core::ser::SerializeMap;
                let mut map = to.serialize_map(None)?;
                $crate::export::json::object::Object::entries(self, &mut map)?;
                map.end()
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

/// Values that are one number or one string.
macro_rules! plain {
    ($($type:ty as $value:ident => $written:expr;)*) => {$(
        impl Json for $type {
            fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let $value = self;
                $written.serialize(to)
            }
        }
    )*};
}

plain! {
    bool as truth => truth;
    i64 as number => number;
    u32 as number => number;
    u64 as number => number;
    usize as number => number;
    str as text => text;
    String as text => text;
    Bytes as bytes => bytes.get();
    ByteDelta as bytes => bytes.get();
    MemKind as kind => kind.name();
    Duration as time => u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
}

impl<T: Json + ?Sized> Json for &T {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        (**self).write(to)
    }
}

/// Writes an unknown value as `null`.
impl<T: Json> Json for Option<T> {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.as_ref().map(AsJson).serialize(to)
    }
}

impl<T: Json> Json for Vec<T> {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter().map(AsJson))
    }
}
