//! Finds the error in a model given as JSON or TOML: the layer, the field, and the allowed values. The errors of
//! `serde` do not name the position in a list of layers, and `serde` accepts unknown fields.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::layer::Named;

/// The fields that contain inner layers.
const INNER: [&str; 4] = ["layers", "shortcut", "encoder", "decoder"];
/// No layer has this many fields. Each field is tried in turn, so if there are more, the wrong one is not searched for.
const MOST_FIELDS: usize = 64;
/// Longer values are cut in messages.
const LONGEST: usize = 40;

/// The position of a layer, such as `blocks.norm` and `layers[1].layers[0]`.
#[derive(Clone, Default)]
struct Place {
    name: String,
    index: String,
}

impl Place {
    fn inner(&self, list: &str, at: usize, layer: &Value) -> Self {
        let name = layer["name"].as_str().unwrap_or_default();
        let join = |outer: &str, inner: &str| {
            let dot = if outer.is_empty() || inner.is_empty() { "" } else { "." };
            format!("{outer}{dot}{inner}")
        };
        Self { name: join(&self.name, name), index: join(&self.index, &format!("{list}[{at}]")) }
    }

    fn says(&self, what: &str) -> String {
        if self.name.is_empty() {
            format!("the layer `{}`: {what}", self.index)
        } else {
            format!("layer `{}` (`{}`): {what}", self.name, self.index)
        }
    }
}

/// Returns the error of the first layer that cannot be read, or else the error of the model `M` around the layers.
/// `None` if everything can be read.
pub(crate) fn wrong_part<M: DeserializeOwned>(model: &Value) -> Option<String> {
    wrong_in(&Place::default(), "layers", model).or_else(|| {
        let error = M::deserialize(model).err()?.to_string();
        Some(format!("outside of the layers, {}", words::<M>(model.as_object()?, error)))
    })
}

fn wrong_in(place: &Place, list: &str, outer: &Value) -> Option<String> {
    let layers = outer.get(list)?.as_array()?;
    layers.iter().enumerate().find_map(|(at, layer)| {
        let error = Named::deserialize(layer).err()?.to_string();
        let place = place.inner(list, at, layer);
        let inside = INNER.iter().find_map(|list| wrong_in(&place, list, layer));
        inside.or_else(|| {
            let fields = layer.as_object();
            Some(place.says(
                &fields.map_or_else(|| "a layer is an object".to_owned(), |fields| words::<Named>(fields, error)),
            ))
        })
    })
}

/// Rewrites an error of `serde` about these fields for the author of the file.
fn words<T: DeserializeOwned>(fields: &Map<String, Value>, error: String) -> String {
    if let Some(rest) = error.strip_prefix("missing field ") {
        return format!("the field {} is missing", rest.trim());
    }
    let Some((field, value)) = wrong_field::<T>(fields, &error) else { return error };
    let allowed = match error.split_once("expected ").map(|(_, expected)| expected) {
        Some("u64") => "a whole number, 0 or more",
        Some("f64") => "a number",
        Some("a boolean") => "true or false",
        Some("a string") => "a text",
        Some("a sequence") => "a list",
        Some(other) => other,
        None => return format!("the field `{field}`: {error}"),
    };
    let mut value = value.to_string();
    if let Some((end, _)) = value.char_indices().nth(LONGEST) {
        value.truncate(end);
        value.push('…');
    }
    format!("the field `{field}` is {value}, and may be {allowed}")
}

/// Returns the field that causes the error: without it, there is another error or none. Without the type, the name or
/// the layers there is always another error, so these are tried last.
fn wrong_field<'a, T: DeserializeOwned>(
    fields: &'a Map<String, Value>,
    error: &str,
) -> Option<(&'a String, &'a Value)> {
    if fields.len() > MOST_FIELDS {
        return None;
    }
    let is_about = |field: &str| {
        let mut rest = fields.clone();
        rest.remove(field);
        T::deserialize(&Value::Object(rest)).err().is_none_or(|other| other.to_string() != error)
    };
    let mut fields: Vec<_> = fields.iter().collect();
    fields.sort_by_key(|(field, _)| (*field == "layers", *field == "name", *field == "type"));
    fields.into_iter().find(|(field, _)| is_about(field))
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
            let what = format!("there is no field `{field}`");
            let what = if place.index.is_empty() { what } else { place.says(&what) };
            return (!is_empty).then_some(what);
        };
        match (value.as_array(), known.as_array()) {
            (Some(read), Some(known)) if INNER.contains(&field.as_str()) => {
                let mut layers = read.iter().zip(known).enumerate();
                layers.find_map(|(at, (layer, known))| unknown_in(&place.inner(field, at, layer), layer, known))
            }
            _ => unknown_in(place, value, known),
        }
    })
}
