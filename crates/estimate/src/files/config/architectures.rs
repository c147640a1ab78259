//! The architectures that are described layer by layer, as data: `architectures.json`.
//!
//! A layer is a text such as `ln_1: layer_norm n_embd`: its name, its type, and its arguments, see [`ARGUMENTS`]. Arguments
//! after these have a name (`output=c_proj`), or are true (`no_bias`). A layer with inner ones is an object of that text and
//! the list of inner layers. An argument is a field of the configuration, a product of fields such as `4*n_embd`, or else
//! the text itself. `@is_decoder=true` names a value for the inner layers; `@in=vision_config` lets them use the fields of
//! an inner object. These are not layers:
//!
//! - `use PART` stands for the layers of a part, and `if FIELD=VALUE` and `unless FIELD=VALUE` for their inner layers.
//! - `NAME: blocks COUNT` contains its inner layers as often as the field says, as numbered blocks.
//! - `decoder FAMILY OBJECT` stands for a model of `families.json`.
//! - A dropout of 0 without a name is left out.
//!
//! To add an architecture, add its record and a line to `tests/modules.jsonl`.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    decoders,
    families::FAMILIES,
    fields::{Fields, head_size, wrong},
};
use crate::{error::Error, model::Model};

/// An architecture: its names, and templates of its model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Architecture {
    pub(super) class: String,
    pub(super) model_type: String,
    input: Value,
    loss: Value,
    /// The field with the longest sequences, if the model cannot be built for longer ones.
    longest: Option<String>,
    /// The fields with the defaults of the Python class. A text is the name of an activation, or a value of other fields
    /// (`= 4*n_embd`).
    defaults: Map<String, Value>,
    /// Fields that cannot be 0, and pairs of which the first one must be a multiple of the second one.
    divisors: Vec<String>,
    /// Fields that change the layers, with the only supported value.
    #[serde(default)]
    is: Map<String, Value>,
    layers: Value,
}

#[derive(Deserialize)]
struct File {
    parts: Map<String, Value>,
    architectures: Vec<Architecture>,
}

static FILE: LazyLock<File> = LazyLock::new(|| {
    serde_json::from_str(include_str!("architectures.json")).expect("`architectures.json` has records of architectures")
});

/// The arguments of layers that need no name, after the type of the layer.
const ARGUMENTS: [&str; 17] = [
    "activation function",
    "attention size heads",
    "conv inputs outputs",
    "dropout probability",
    "embedding rows size",
    "embeddings size tokens positions segments",
    "gemma_norm size",
    "layer_norm size",
    "leave slot",
    "linear inputs outputs",
    "patch_embedding channels image patch size",
    "positions rows size",
    "provide slot",
    "release slot",
    "rms_norm size",
    "similarity slot",
    "tied_embedding tied_to",
];
/// Arguments that are lists.
const LISTS: [&str; 5] = ["kernel", "stride", "padding", "sizes", "names"];
/// Arguments that are the names of layers inside attention.
const NAMES: [&str; 5] = ["queries", "keys", "values", "joined", "output"];

/// Returns the architectures, in the order of the file.
pub(super) fn all() -> impl Iterator<Item = &'static Architecture> {
    FILE.architectures.iter()
}

/// Builds a model for sequences of this length.
pub(super) fn build(architecture: &'static Architecture, fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let Architecture { model_type, input, loss, longest, defaults, divisors, is, layers, .. } = architecture;
    for (key, known) in is {
        fields.is(key, known.clone())?;
    }
    let filler = Filler { fields, defaults, inside: None, values: vec![("length", length.into())] };
    for divisor in divisors {
        let (size, key) = divisor.split_once('/').unwrap_or(("", divisor));
        match (filler.number(key)?, size) {
            (0, _) => return Err(is_zero(key)),
            (_, "") => {}
            (heads, size) => drop(head_size(filler.number(size)?, heads)?),
        }
    }
    if let Some(positions) = longest.as_ref().map(|key| filler.number(key)).transpose()?
        && length > positions
    {
        return Err(wrong(format!("texts of {length} tokens are longer than the {positions} positions")));
    }
    let (input, layers) = (filler.filled(input)?, filler.layers(layers)?);
    Model::deserialize(json!({"name": model_type, "input": input, "loss": loss, "layers": layers})).map_err(wrong)
}

fn is_zero(key: &str) -> Error {
    wrong(format!("`{}` is 0", key.rsplit('.').next().unwrap_or(key)))
}

/// Fills templates with the fields of a configuration.
#[derive(Clone)]
struct Filler<'a> {
    fields: Fields<'a>,
    defaults: &'static Map<String, Value>,
    /// The inner object whose fields are used.
    inside: Option<&'static str>,
    /// Named values, the latest last.
    values: Vec<(&'static str, Value)>,
}

impl<'a> Filler<'a> {
    fn with(&self, name: &'static str, value: Value) -> Self {
        let mut filler = self.clone();
        filler.values.push((name, value));
        filler
    }

    /// Returns the object with a field, its key, and its default. `None` if there is no such field.
    fn field(&self, name: &'static str) -> Option<(Fields<'a>, &'static str, &'static Value)> {
        let (inside, key) = match name.split_once('.') {
            Some((inner, key)) if self.defaults.contains_key(inner) => (Some(inner), key),
            _ => (self.inside, name),
        };
        let defaults = inside.map_or(Some(self.defaults), |inner| self.defaults.get(inner)?.as_object())?;
        Some((inside.map_or(self.fields, |inner| self.fields.inner(inner)), key, defaults.get(key)?))
    }

    /// Returns the value of an argument.
    fn value(&self, text: &'static str) -> Result<Value, Error> {
        if let Some((_, value)) = self.values.iter().rev().find(|(name, _)| *name == text) {
            return Ok(value.clone());
        }
        if let Some((fields, key, default)) = self.field(text) {
            return match (default, default.as_str().map(|default| (default.strip_prefix("= "), default))) {
                (_, Some((Some(derived), _))) => Ok(fields.derived(key, self.number(derived)?)?.into()),
                (_, Some((None, function))) => Ok(json!(fields.function(key, function)?)),
                (Value::Bool(default), _) => Ok(fields.flag(key, *default)?.into()),
                _ => match default.as_u64() {
                    Some(default) => Ok(fields.number(key, default)?.into()),
                    None => Ok(fields.fraction(key, default.as_f64().unwrap_or_default())?.into()),
                },
            };
        }
        match text {
            "classes" => {
                let labels = self.fields.get("id2label").and_then(Value::as_object).map(|labels| labels.len() as u64);
                Ok(labels.or(self.fields.optional("num_labels")?).unwrap_or(2).into())
            }
            "true" | "false" => Ok((text == "true").into()),
            _ if text.starts_with(|first: char| first.is_ascii_digit()) || text.contains(['*', '/', '+']) => {
                Ok(self.number(text)?.into())
            }
            _ => Ok(text.into()),
        }
    }

    /// Returns a sum of products of quotients.
    fn number(&self, text: &'static str) -> Result<u64, Error> {
        let too_large = || wrong("the sizes are too large");
        let all = |parts: &mut dyn Iterator<Item = &'static str>, add: fn(u64, u64) -> Option<u64>| {
            let mut parts = parts.map(|part| self.number(part));
            let first = parts.next().unwrap_or(Ok(0))?;
            parts.try_fold(first, |result, part| add(result, part?).ok_or_else(too_large))
        };
        if text.contains('+') {
            return all(&mut text.split('+'), u64::checked_add);
        }
        if text.contains('*') {
            return all(&mut text.split('*'), u64::checked_mul);
        }
        if let Some((dividend, divisor)) = text.split_once('/') {
            return self.number(dividend)?.checked_div(self.number(divisor)?).ok_or_else(|| is_zero(divisor));
        }
        match text.parse() {
            Ok(number) => Ok(number),
            Err(_) => self.value(text)?.as_u64().ok_or_else(|| wrong(format!("`{text}` is not a whole number"))),
        }
    }

    /// Fills all texts inside a value.
    fn filled(&self, value: &'static Value) -> Result<Value, Error> {
        match value {
            Value::String(text) => self.value(text),
            Value::Array(values) => values.iter().map(|value| self.filled(value)).collect(),
            Value::Object(fields) => {
                fields.iter().map(|(key, value)| Ok((key.clone(), self.filled(value)?))).collect::<Result<_, _>>()
            }
            other => Ok(other.clone()),
        }
    }

    /// Returns the layers of a list of templates.
    fn layers(&self, templates: &'static Value) -> Result<Vec<Value>, Error> {
        let mut layers = Vec::new();
        for template in templates.as_array().into_iter().flatten() {
            let (text, inner) = match template.as_object().and_then(|template| template.iter().next()) {
                Some((text, inner)) => (text.as_str(), inner),
                None => (template.as_str().unwrap_or_default(), &Value::Null),
            };
            let (name, text) = text.split_once(": ").unwrap_or(("", text));
            let (kind, arguments) = text.split_once(' ').unwrap_or((text, ""));
            match kind {
                "use" => layers.extend(self.layers(&FILE.parts[arguments])?),
                "if" | "unless" => {
                    if self.holds(arguments)? == (kind == "if") {
                        layers.extend(self.layers(inner)?);
                    }
                }
                "decoder" => layers.extend(self.decoder(arguments)?),
                "blocks" => layers.push(self.blocks(name, arguments, inner)?),
                _ => layers.extend(self.layer(name, kind, arguments, inner)?),
            }
        }
        Ok(layers)
    }

    /// Returns whether a field has a value.
    fn holds(&self, condition: &'static str) -> Result<bool, Error> {
        let (name, expected) = condition.split_once('=').unwrap_or((condition, "true"));
        match self.field(name) {
            Some((fields, key, Value::String(default))) => Ok(fields.text(key, default)? == expected),
            _ => Ok(self.value(name)? == (expected == "true")),
        }
    }

    fn blocks(&self, name: &str, count: &'static str, inner: &'static Value) -> Result<Value, Error> {
        let count = Fields::blocks(count, self.number(count)?)?;
        let blocks = (0..count).map(|at| {
            let layers = self.with("first", u64::from(at == 0).into()).layers(inner)?;
            Ok(json!({"name": at.to_string(), "type": "block", "layers": layers}))
        });
        Ok(json!({"name": name, "type": "sequential", "layers": blocks.collect::<Result<Vec<_>, Error>>()?}))
    }

    /// Returns a layer. `None` if it would do nothing.
    fn layer(
        &self,
        name: &str,
        kind: &str,
        arguments: &'static str,
        inner: &'static Value,
    ) -> Result<Option<Value>, Error> {
        let mut unnamed =
            ARGUMENTS.iter().find_map(|known| known.strip_prefix(kind)?.strip_prefix(' ')).unwrap_or("").split(' ');
        let mut filler = self.clone();
        let mut layer = Map::from_iter([("name".to_owned(), name.into()), ("type".to_owned(), kind.into())]);
        for argument in arguments.split(' ').filter(|argument| !argument.is_empty()) {
            if let Some((name, value)) = argument.strip_prefix('@').and_then(|named| named.split_once('=')) {
                match name {
                    "in" => filler.inside = Some(value),
                    _ => filler = filler.with(name, self.value(value)?),
                }
                continue;
            }
            let (key, value) = match argument.split_once('=') {
                Some((key, list)) if LISTS.contains(&key) => {
                    (key, list.split(',').map(|value| filler.value(value)).collect::<Result<_, _>>()?)
                }
                Some((key, value)) => (key, filler.value(value)?),
                None => match unnamed.next().filter(|key| !key.is_empty()) {
                    Some(key) => (key, filler.value(argument)?),
                    None => (argument, true.into()),
                },
            };
            if NAMES.contains(&key) {
                layer.entry("names").or_insert_with(|| json!({}))[key] = value;
            } else {
                layer.insert(key.to_owned(), value);
            }
        }
        if kind == "dropout" && name.is_empty() && layer["probability"].as_f64() == Some(0.0) {
            return Ok(None);
        }
        match inner {
            Value::Object(lists) => {
                for (key, list) in lists {
                    layer.insert(key.clone(), filler.layers(list)?.into());
                }
            }
            Value::Array(_) => drop(layer.insert("layers".to_owned(), filler.layers(inner)?.into())),
            _ => {}
        }
        Ok(Some(layer.into()))
    }

    /// Returns the layers of a model of a family, whose configuration is an inner object.
    fn decoder(&self, arguments: &'static str) -> Result<Vec<Value>, Error> {
        let mut words = arguments.split(' ');
        let (model_type, object) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let family =
            FAMILIES.iter().find(|family| family.model_type == model_type).expect("a family of `families.json`");
        let named = |key: &str| words.clone().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let inner = self.fields.inner(object);
        let mut text = inner.object();
        if let Some(key) = named("inherits")
            && text.get(key).is_none_or(Value::is_null)
            && let Some(value) = self.fields.get(key)
        {
            text.insert(key.to_owned(), value.clone());
        }
        let text = Value::Object(text);
        let layers = decoders::layers(
            family,
            inner.of(&text),
            named("prefix").unwrap_or_default(),
            named("head").unwrap_or_default(),
        )?;
        Ok(layers.into_iter().map(|layer| json!(layer)).collect())
    }
}
