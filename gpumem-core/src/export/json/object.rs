//! Objects of JSON. The derive macro of `serde` would bring two crates to every program.

use serde_core::ser::SerializeMap;

/// A type that is written as a JSON object.
pub(super) trait Object {
    /// Writes its entries, in their order.
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

/// Declares a struct whose fields are the entries of an object. At the end there may be `; unless_empty field: Type`, which is left out
/// if it is empty, or `; flatten field: Type`, whose entries are those of the object.
macro_rules! object {
    (
        $(#[$attribute:meta])*
        $vis:vis struct $name:ident $(<$life:lifetime>)? {
            $($(#[$doc:meta])* $field_vis:vis $field:ident: $type:ty),* $(,)?
            $(; unless_empty $list:ident: $list_type:ty)?
            $(; flatten $inner:ident: $inner_type:ty)?
        }
    ) => {
        $(#[$attribute])*
        $vis struct $name $(<$life>)? {
            $($(#[$doc])* $field_vis $field: $type,)*
            $($list: $list_type,)?
            $($inner: $inner_type,)?
        }

        impl $(<$life>)? $crate::export::json::object::Object for $name $(<$life>)? {
            fn entries<M: serde_core::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                // A field such as `r#type` has the name of a keyword.
                $(map.serialize_entry(stringify!($field).trim_start_matches("r#"), &self.$field)?;)*
                $(if !self.$list.is_empty() {
                    map.serialize_entry(stringify!($list), &self.$list)?;
                })?
                $($crate::export::json::object::Object::entries(&self.$inner, map)?;)?
                Ok(())
            }
        }

        impl $(<$life>)? serde_core::Serialize for $name $(<$life>)? {
            fn serialize<S: serde_core::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde_core::ser::SerializeMap;
                let mut map = serializer.serialize_map(None)?;
                $crate::export::json::object::Object::entries(self, &mut map)?;
                map.end()
            }
        }
    };
}

pub(super) use object;
