//! Finds what is wrong with a model given as JSON or TOML. The errors of `serde` do not name the position in a list of layers, and
//! `serde` accepts unknown fields.

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{Layer, Named};

/// The fields that contain inner layers.
const INNER: [&str; 4] = ["layers", "shortcut", "encoder", "decoder"];

/// The name and the position of a layer, such as `blocks.norm` and `layers[1].layers[0]`. Both are empty outside of all
/// layers.
type Place = [String; 2];

fn inner(place: &Place, list: &str, at: usize, layer: &Value) -> Place {
    let name = layer["name"].as_str().unwrap_or_default();
    let join = |outer: &String, inner: &str| {
        let dot = if outer.is_empty() || inner.is_empty() { "" } else { "." };
        format!("{outer}{dot}{inner}")
    };
    [join(&place[0], name), join(&place[1], &format!("{list}[{at}]"))]
}

/// Reads a model. The error is that of the first layer that cannot be read, or that has an unknown field, such as a misspelt one.
pub(crate) fn read<T: Serialize + DeserializeOwned>(fields: &Value) -> Result<T, String> {
    check::<T>(&Place::default(), fields)?;
    T::deserialize(fields).map_err(|error| error.to_string())
}

fn check<T: Serialize + DeserializeOwned>(place: &Place, fields: &Value) -> Result<(), String> {
    // Inner layers have been checked, so one stands for all. Otherwise, each would be read as often as there are layers around it.
    let mut own = Map::new();
    for (field, value) in fields.as_object().into_iter().flatten() {
        let layers = value.as_array().filter(|_| INNER.contains(&field.as_str()));
        for (at, layer) in layers.into_iter().flatten().enumerate() {
            check::<Named>(&inner(place, field, at, layer), layer)?;
        }
        let is_long = layers.is_some_and(|layers| !layers.is_empty());
        own.insert(field.clone(), if is_long { json!([Layer::Flatten.named("")]) } else { value.clone() });
    }
    let says = |what: String| match place {
        [_, index] if index.is_empty() => what,
        [name, index] if name.is_empty() => format!("the layer `{index}`: {what}"),
        [name, index] => format!("layer `{name}` (`{index}`): {what}"),
    };
    let own = if fields.is_object() { own.into() } else { fields.clone() };
    let value = T::deserialize(&own).map_err(|error| says(error.to_string()))?;
    match unknown(&own, &serde_json::to_value(&value).unwrap_or_default()) {
        Some(field) => Err(says(format!("there is no field `{field}`"))),
        None => Ok(()),
    }
}

/// Returns a field of an object that `known`, which `serde` has written, does not have.
fn unknown<'a>(fields: &'a Value, known: &Value) -> Option<&'a str> {
    fields.as_object()?.iter().find_map(|(field, value)| match known.as_object()?.get(field) {
        Some(known) => unknown(value, known),
        // Empty fields are not serialized.
        None => (!value.is_null() && value.as_array().is_none_or(|list| !list.is_empty())).then_some(field.as_str()),
    })
}
