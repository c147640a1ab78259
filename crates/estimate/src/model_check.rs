//! Finds the layer that causes the error in a model given as JSON or TOML. The errors of `serde` do not name the position
//! in a list of layers, and `serde` accepts unknown fields.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::layer::Named;

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

fn says([name, index]: &Place, what: &str) -> String {
    match (name.as_str(), index.as_str()) {
        (_, "") => what.to_owned(),
        ("", index) => format!("the layer `{index}`: {what}"),
        (name, index) => format!("layer `{name}` (`{index}`): {what}"),
    }
}

/// Returns the error of the first layer that cannot be read. `None` if all can be read.
pub(crate) fn wrong_layer(model: &Value) -> Option<String> {
    wrong_in(&Place::default(), "layers", model)
}

fn wrong_in(place: &Place, list: &str, outer: &Value) -> Option<String> {
    let layers = outer.get(list)?.as_array()?;
    layers.iter().enumerate().find_map(|(at, layer)| {
        let error = Named::deserialize(layer).err()?;
        let place = inner(place, list, at, layer);
        let inside = INNER.iter().find_map(|list| wrong_in(&place, list, layer));
        inside.or_else(|| Some(says(&place, &error.to_string())))
    })
}

/// Returns an unknown field of a model, such as a misspelt one, with its position. `serde` would ignore it.
pub(crate) fn unknown_field(read: &Value, model: &impl Serialize) -> Option<String> {
    let known = model.serialize(serde_json::value::Serializer).ok()?;
    unknown_in(&Place::default(), read, &known)
}

fn unknown_in(place: &Place, read: &Value, known: &Value) -> Option<String> {
    let (read, known) = (read.as_object()?, known.as_object()?);
    read.iter().find_map(|(field, value)| {
        let Some(known) = known.get(field) else {
            // Empty fields are not serialized.
            let is_empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
            return (!is_empty).then(|| says(place, &format!("there is no field `{field}`")));
        };
        match (value.as_array(), known.as_array()) {
            (Some(read), Some(known)) if INNER.contains(&field.as_str()) => {
                let mut layers = read.iter().zip(known).enumerate();
                layers.find_map(|(at, (layer, known))| unknown_in(&inner(place, field, at, layer), layer, known))
            }
            _ => unknown_in(place, value, known),
        }
    })
}
