//! The architectures, as data: `architectures.json`. Each is described layer by layer, with templates.
//!
//! A layer is a text such as `ln_1: layer_norm n_embd`: its name, its type, and its arguments, see [`ARGUMENTS`]. Arguments
//! after these have a name (`output=c_proj`), or are true (`no_bias`). A layer with inner ones is an object of that text and
//! the list of inner layers. An argument is a field of the configuration, a product of fields such as `4*n_embd`, a choice
//! (`first?a:b`, with conditions such as `a&!b`), or else the text itself. `{prefix}` stands for a value inside of a name, a type or a
//! text. `@is_decoder=true` names a value for the inner layers; `@in=vision_config` lets them use the fields of an inner object. These
//! are not layers:
//!
//! - `use PART` stands for the layers of a part, and `if FIELD=VALUE` and `unless FIELD=VALUE` for their inner layers. `repeat COUNT`
//!   stands for its inner layers as often as the field says.
//! - `NAME: blocks COUNT` contains its inner layers as often as the field says, as numbered blocks.
//! - `decoder MODEL_TYPE OBJECT` stands for the layers of another architecture, whose configuration is an inner object.
//! - A dropout of 0 without a name is left out.
//!
//! Models that predict the next token share the part `decoder`. The field `decoder` of their records has the values in which they
//! differ, and `decoders.rs` adds what follows from the fields of a configuration. A record that is `like` an earlier one has its
//! fields, with its own changes. `torchvision` has the models of torchvision, as parts with values or as configurations.
//!
//! To add an architecture, add its record and a line to `tests/modules.jsonl`, which `measure/models.py` completes.

use std::{rc::Rc, sync::LazyLock};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    decoders::{self, Values},
    fields::{Fields, head_size, is_zero, wrong},
};
use crate::{Input, Loss, Model, Result, Shape, ensure};

/// An architecture: its names, and templates of its model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::files) struct Architecture {
    /// The Python class, which a `config.json` lists in `architectures`.
    pub(super) class: String,
    /// The `model_type` of a `config.json`.
    pub(in crate::files) model_type: String,
    /// The name in GGUF files. An architecture with experts may share it with one without experts.
    pub(in crate::files) gguf: Option<String>,
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
    /// Fields that change the layers, and that must be false or 0.
    #[serde(default)]
    off: Vec<String>,
    /// The values of the part `decoder`, if the model predicts the next token. A text may be an argument of other values.
    decoder: Option<Map<String, Value>>,
    layers: Value,
}

#[derive(Deserialize)]
struct File {
    parts: Map<String, Value>,
    torchvision: Map<String, Value>,
    #[serde(deserialize_with = "whole")]
    architectures: Vec<Architecture>,
}

static FILE: LazyLock<File> = LazyLock::new(|| {
    serde_json::from_str(include_str!("architectures.json")).expect("`architectures.json` has records of architectures")
});

/// Completes records with the fields of those that they are like.
fn whole<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Architecture>, D::Error> {
    let mut whole: Vec<Map<String, Value>> = Vec::new();
    for mut record in Vec::<Map<String, Value>>::deserialize(from)? {
        let mut all = record.remove("like").map_or_else(Map::new, |like| {
            let like = whole.iter().find(|known| known["model_type"] == like);
            like.expect("a record is like one before it").clone()
        });
        for (field, value) in record {
            match (all.get_mut(&field), value) {
                // The values are those of the other record, with these changes.
                (Some(Value::Object(values)), Value::Object(changed)) => values.extend(changed),
                (_, value) => drop(all.insert(field, value)),
            }
        }
        whole.push(all);
    }
    whole
        .into_iter()
        .map(|record| Architecture::deserialize(Value::Object(record)).map_err(serde::de::Error::custom))
        .collect()
}

/// The arguments of layers that need no name, after the type of the layer.
const ARGUMENTS: &str = "activation function, attention size heads, batch_norm channels, channel_scale size, conv inputs outputs, \
                         dropout probability, embedding rows size, embeddings size tokens positions segments, gate function, \
                         gemma_norm size, layer_norm size, leave slot, linear inputs outputs, \
                         patch_embedding channels image patch size, positions rows size, provide slot, release slot, \
                         rms_norm size, similarity slot, tied_embedding tied_to";
/// Arguments that are lists. Others are lists if they have a comma.
const LISTS: [&str; 4] = ["kernel", "stride", "padding", "sizes"];
/// Arguments that are the names of layers inside attention.
const NAMES: [&str; 6] = ["queries", "keys", "values", "joined", "output", "norms"];

/// Returns the architectures, in the order of the file.
pub(in crate::files) fn all() -> impl Iterator<Item = &'static Architecture> {
    FILE.architectures.iter()
}

impl Architecture {
    /// Returns whether blocks may have experts in place of an MLP.
    pub(in crate::files) fn has_experts(&self) -> bool {
        self.decoder.as_ref().is_some_and(|values| values["experts"] == true)
    }

    /// Returns the fields of a configuration, with default values for those that are missing.
    fn with_defaults(&self, fields: Fields<'_>) -> Value {
        if self.decoder.is_some() { fields.with_defaults(&self.defaults) } else { Value::Object(fields.object()) }
    }
}

/// Builds a model for sequences of this length.
pub(super) fn build(architecture: &'static Architecture, fields: Fields<'_>, length: u64) -> Result<Model> {
    let Architecture { model_type, input, loss, longest, layers, defaults, .. } = architecture;
    let parts = defaults.iter().filter(|(_, default)| default.is_object());
    parts.into_iter().try_for_each(|(part, _)| fields.check_object(part))?;
    let all = architecture.with_defaults(fields);
    let filler = Filler::new(architecture, fields.of(&all))?.with("length", length.into());
    let positions = longest.as_ref().map_or(Ok(u64::MAX), |key| filler.number(key))?;
    let wrong_length = || wrong(format!("texts of {length} tokens are longer than the {positions} positions"));
    ensure(length <= positions, wrong_length)?;
    let (name, input, layers) = (model_type.trim_end_matches("_text"), filler.filled(input)?, filler.layers(layers)?);
    Model::deserialize(json!({"name": name, "input": input, "loss": loss, "layers": layers})).map_err(wrong)
}

/// Builds a model of torchvision for images of 224 × 224 and 1000 classes. `None` if the name is not known.
pub(crate) fn torchvision(name: &str) -> Option<Result<Model>> {
    let config = match FILE.torchvision.get(name)? {
        Value::String(part) => part,
        config => return Some(Model::from_fields(config, 0).map(|model| Model { name: name.to_owned(), ..model })),
    };
    let assumed = std::cell::RefCell::default();
    let fields = Fields::new(&Value::Null, &assumed);
    let filler = Filler { architecture: None, fields, inside: None, values: vec![], blocks: Rc::default() };
    let layers = filler.part(config).and_then(|layers| Vec::deserialize(Value::from(layers)).map_err(wrong));
    let input = Input::Numbers(Shape::from([3, 224, 224]));
    Some(layers.map(|layers| Model { name: name.to_owned(), input, layers, loss: Loss::CrossEntropy }))
}

/// Fills templates with the fields of a configuration.
#[derive(Clone)]
struct Filler<'a> {
    /// `None` for a model of torchvision, whose layers without a name have numbers.
    architecture: Option<&'static Architecture>,
    fields: Fields<'a>,
    /// The inner object whose fields are used.
    inside: Option<&'static str>,
    /// Named values, the latest last.
    values: Values,
    /// The values that differ from block to block, if there are any.
    blocks: Rc<Vec<Values>>,
}

impl<'a> Filler<'a> {
    /// Checks the fields of a configuration, in which defaults may be missing unless the model predicts the next token.
    fn new(architecture: &'static Architecture, fields: Fields<'a>) -> Result<Self> {
        let mut filler =
            Self { architecture: Some(architecture), fields, inside: None, values: vec![], blocks: Rc::default() };
        for (key, known) in &architecture.is {
            fields.is(key, known.clone())?;
        }
        for key in &architecture.off {
            fields.is_off(key)?;
        }
        for divisor in &architecture.divisors {
            let (size, key) = divisor.split_once('/').unwrap_or(("", divisor));
            match (filler.number(key)?, size) {
                (0, _) => return Err(is_zero(key)),
                (_, "") => {}
                (heads, size) => drop(head_size(filler.number(size)?, heads)?),
            }
        }
        if let Some(parts) = &architecture.decoder {
            (filler.values, filler.blocks) =
                (decoders::values(parts, fields)?, Rc::new(decoders::of_blocks(parts, fields)?));
        }
        Ok(filler)
    }

    fn with(&self, name: &'static str, value: Value) -> Self {
        let mut filler = self.clone();
        filler.values.push((name, value));
        filler
    }

    /// Returns the object with a field, its key, and its default. `None` if there is no such field.
    fn field(&self, name: &'static str) -> Option<(Fields<'a>, &'static str, &'static Value)> {
        let all = &self.architecture?.defaults;
        let (inside, key) = match name.split_once('.') {
            Some((inner, key)) if all.contains_key(inner) => (Some(inner), key),
            _ => (self.inside, name),
        };
        let defaults = inside.map_or(Some(all), |inner| all.get(inner)?.as_object())?;
        Some((inside.map_or(self.fields, |inner| self.fields.inner(inner)), key, defaults.get(key)?))
    }

    /// Returns a value of the part `decoder`.
    fn of_decoder(&self, name: &str) -> Option<&'static Value> {
        self.architecture?.decoder.as_ref()?.get(name)
    }

    /// Returns a text with values in place of their names in braces.
    fn text(&self, text: &str) -> String {
        let Some((before, (name, after))) =
            text.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
        else {
            return text.to_owned();
        };
        let named = self.values.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value);
        let value = named.or(self.of_decoder(name)).and_then(Value::as_str).unwrap_or_default();
        format!("{before}{value}{}", self.text(after))
    }

    /// Returns whether a condition holds: a field that is true or not 0, or that has a value (`a=b`), or several of these.
    fn is_true(&self, condition: &'static str) -> Result<bool> {
        if let Some((first, second)) = condition.split_once('&') {
            return Ok(self.is_true(first)? && self.is_true(second)?);
        }
        if let Some(condition) = condition.strip_prefix('!') {
            return Ok(!self.is_true(condition)?);
        }
        let Some((name, expected)) = condition.split_once('=') else {
            let value = self.value(condition)?;
            return Ok(value == true || value.as_u64().is_some_and(|number| number > 0));
        };
        match self.field(name) {
            Some((fields, key, Value::String(default))) => Ok(fields.text(key, default)? == expected),
            _ => Ok(self.value(name)? == self.value(expected)?),
        }
    }

    /// Returns the value of an argument.
    fn value(&self, text: &'static str) -> Result<Value> {
        if let Some((condition, values)) = text.split_once('?') {
            let (first, second) = values.split_once(':').unwrap_or((values, ""));
            return self.value(if self.is_true(condition)? { first } else { second });
        }
        if text.contains(['&', '!']) {
            return Ok(self.is_true(text)?.into());
        }
        if text.contains('{') {
            return Ok(self.text(text).into());
        }
        if let Some((_, value)) = self.values.iter().rev().find(|(name, _)| *name == text) {
            return Ok(value.clone());
        }
        match self.of_decoder(text) {
            Some(Value::String(argument)) => return self.value(argument),
            Some(value) => return Ok(value.clone()),
            None => {}
        }
        if let Some((fields, key, default)) = self.field(text) {
            return Ok(match default {
                Value::String(text) => match text.strip_prefix("= ") {
                    Some(derived) => fields.optional(key)?.map_or_else(|| self.number(derived), Ok)?.into(),
                    None => json!(fields.function(key, text)?),
                },
                Value::Bool(default) => fields.flag(key, *default)?.into(),
                _ => match default.as_u64() {
                    Some(default) => fields.number(key, default)?.into(),
                    None => fields.fraction(key, default.as_f64().unwrap_or_default())?.into(),
                },
            });
        }
        match text {
            "classes" => {
                let labels = self.fields.get("id2label").and_then(Value::as_object).map(|labels| labels.len() as u64);
                Ok(labels.or(self.fields.optional("num_labels")?).unwrap_or(2).into())
            }
            "true" | "false" => Ok((text == "true").into()),
            _ if text.contains(['*', '/', '+']) => Ok(self.number(text)?.into()),
            // A number, or a text.
            _ => Ok(serde_json::from_str::<serde_json::Number>(text).map_or_else(|_| text.into(), Value::from)),
        }
    }

    /// Returns a sum of products of quotients.
    fn number(&self, text: &'static str) -> Result<u64> {
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
        self.value(text)?.as_u64().ok_or_else(|| wrong(format!("`{text}` is not a whole number")))
    }

    /// Fills all texts inside a value.
    fn filled(&self, value: &'static Value) -> Result<Value> {
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
    fn layers(&self, templates: &'static Value) -> Result<Vec<Value>> {
        let mut layers = Vec::new();
        for template in templates.as_array().into_iter().flatten() {
            let (text, inner) = match template.as_object().and_then(|template| template.iter().next()) {
                Some((text, inner)) => (text.as_str(), inner),
                None => (template.as_str().unwrap_or_default(), &Value::Null),
            };
            let (name, text) = text.split_once(": ").unwrap_or(("", text));
            let (kind, arguments) = text.split_once(' ').unwrap_or((text, ""));
            match kind {
                "use" => layers.extend(self.part(arguments)?),
                "if" | "unless" => {
                    if self.is_true(arguments)? == (kind == "if") {
                        layers.extend(self.layers(inner)?);
                    }
                }
                "decoder" => layers.extend(self.decoder(arguments)?),
                "repeat" => {
                    for at in 0..self.number(arguments)? {
                        layers.extend(self.with("first", u64::from(at == 0).into()).layers(inner)?);
                    }
                }
                "blocks" => layers.push(self.blocks(name, arguments, inner)?),
                _ => layers.extend(self.layer(name, kind, arguments, inner)?),
            }
        }
        Ok(layers)
    }

    /// Returns the layers of a part, with the values that follow its name.
    fn part(&self, text: &'static str) -> Result<Vec<Value>> {
        let (name, arguments) = text.split_once(' ').unwrap_or((text, ""));
        self.within(arguments)?.0.layers(&FILE.parts[&self.text(name)])
    }

    /// Returns the filler that inner layers use, and the arguments that are not for them.
    fn within(&self, arguments: &'static str) -> Result<(Self, Vec<&'static str>)> {
        let (mut filler, mut others) = (self.clone(), Vec::new());
        for argument in arguments.split(' ').filter(|argument| !argument.is_empty()) {
            match argument.strip_prefix('@').and_then(|named| named.split_once('=')) {
                Some(("in", object)) => filler.inside = Some(object),
                Some((name, value)) => filler.values.push((name, self.value(value)?)),
                None => others.push(argument),
            }
        }
        Ok((filler, others))
    }

    fn blocks(&self, name: &str, count: &'static str, inner: &'static Value) -> Result<Value> {
        let count = Fields::blocks(count, self.number(count)?)?;
        let blocks = (0..count).map(|at| {
            let mut filler = self.with("first", u64::from(at == 0).into());
            filler.values.extend(self.blocks.get(at).into_iter().flatten().cloned());
            Ok(json!({"name": at.to_string(), "type": "block", "layers": filler.layers(inner)?}))
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        Ok(json!({"name": self.text(name), "type": "sequential", "layers": blocks}))
    }

    /// Returns inner layers. Those of models of torchvision have numbers if they have no names.
    fn inner(&self, templates: &'static Value) -> Result<Value> {
        let mut layers = self.layers(templates)?;
        for (at, layer) in layers.iter_mut().enumerate().filter(|_| self.architecture.is_none()) {
            if layer["name"] == "" {
                layer["name"] = at.to_string().into();
            }
        }
        Ok(layers.into())
    }

    /// Returns a layer. `None` if it would do nothing.
    fn layer(&self, name: &str, kind: &str, arguments: &'static str, inner: &'static Value) -> Result<Option<Value>> {
        let (name, kind) = (self.text(name), self.text(kind));
        let mut known = ARGUMENTS.split(", ").map(|known| known.split_once(' ').unwrap_or((known, "")));
        let mut unnamed = known.find(|(known, _)| *known == kind).map_or("", |(_, names)| names).split(' ');
        let (filler, arguments) = self.within(arguments)?;
        let mut layer =
            Map::from_iter([("name".to_owned(), name.clone().into()), ("type".to_owned(), kind.clone().into())]);
        for argument in arguments {
            let (key, value) = match argument.split_once('=') {
                Some((key, list)) if LISTS.contains(&key) || list.contains(',') => {
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
                    layer.insert(key.clone(), filler.inner(list)?);
                }
            }
            Value::Array(_) => drop(layer.insert("layers".to_owned(), filler.inner(inner)?)),
            _ => {}
        }
        Ok(Some(layer.into()))
    }

    /// Returns the layers of another architecture, whose configuration is an inner object.
    fn decoder(&self, arguments: &'static str) -> Result<Vec<Value>> {
        let mut words = arguments.split(' ');
        let (model_type, object) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let architecture =
            all().find(|known| known.model_type == model_type).expect("a record of `architectures.json`");
        let (inner, mut own, mut values) =
            (self.fields.inner(object), self.fields.inner(object).object(), Values::new());
        for (key, value) in words.filter_map(|word| word.split_once('=')) {
            if key != "inherits" {
                values.push((key, value.into()));
            } else if own.get(value).is_none_or(Value::is_null)
                && let Some(outer) = self.fields.get(value)
            {
                own.insert(value.to_owned(), outer.clone());
            }
        }
        let own = Value::Object(own);
        let whole = architecture.with_defaults(inner.of(&own));
        let mut filler = Filler::new(architecture, inner.of(&whole))?;
        filler.values.extend(values);
        filler.layers(&architecture.layers)
    }
}
