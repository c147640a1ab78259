//! The fields of a configuration.

use std::{cell::RefCell, collections::BTreeMap};

use serde_json::{Map, Value};

use crate::{Error, Function, Result};

/// The largest number of blocks, which no known model reaches. Each block is run, because the allocator's free blocks
/// differ from one to the next. Without a limit, a short file could therefore take any time and memory.
const MOST_BLOCKS: u64 = 1024;

/// The integers that a configuration leaves out, with the default values of the Python class.
pub(crate) type Assumed = BTreeMap<String, u64>;

/// The fields of a configuration, or of an object inside it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    value: &'a Value,
    /// The key of the inner object.
    inside: Option<&'a str>,
    assumed: &'a RefCell<Assumed>,
}

pub(super) fn wrong(what: impl std::fmt::Display) -> Error {
    Error::invalid(format!("config.json: {what}"))
}

pub(super) fn is_zero(key: &str) -> Error {
    wrong(format!("`{}` is 0", key.rsplit('.').next().unwrap_or(key)))
}

/// Returns the size of one head of a layer of this size.
pub(super) fn head_size(size: u64, heads: u64) -> Result<u64> {
    match size.checked_rem(heads) {
        Some(0) => Ok(size / heads),
        _ => Err(wrong(format!("{size} features cannot be divided among {heads} heads"))),
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, assumed: &'a RefCell<Assumed>) -> Self {
        Self { value, inside: None, assumed }
    }

    /// Returns a field, which may be `null`. `None` if it is missing.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.value.get(key)
    }

    fn known(self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// Returns the result of `read` for a field. `None` if the field is missing or `null`.
    fn read<T>(self, key: &str, expected: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let read = |value| read(value).ok_or_else(|| wrong(format!("`{key}` is {value} and not {expected}")));
        self.known(key).map(read).transpose()
    }

    /// Returns an error if a field is something else than an object.
    pub(super) fn check_object(self, key: &str) -> Result<()> {
        self.read(key, "an object", Value::as_object).map(drop)
    }

    /// Returns a number. If it is missing, returns the default of the Python class and notes that it was assumed.
    pub(super) fn number(self, key: &str, default: u64) -> Result<u64> {
        let number = self.optional(key)?;
        if number.is_none() {
            self.assume(key, default);
        }
        Ok(number.unwrap_or(default))
    }

    fn assume(self, key: &str, default: u64) {
        let inside = self.inside.map(|inside| format!("{inside}.")).unwrap_or_default();
        self.assumed.borrow_mut().insert(inside + key, default);
    }

    /// Returns all fields, with these defaults for those that are missing or `null`. Notes the numbers among them. A default that
    /// follows from other fields is left out.
    pub(super) fn with_defaults(self, defaults: &Map<String, Value>) -> Value {
        let mut all = self.object();
        let is_derived = |default: &Value| default.as_str().is_some_and(|text| text.starts_with("= "));
        for (key, default) in defaults.iter().filter(|(key, value)| self.known(key).is_none() && !is_derived(value)) {
            if let Some(number) = default.as_u64().filter(|number| *number > 0) {
                self.assume(key, number);
            }
            all.insert(key.clone(), default.clone());
        }
        Value::Object(all)
    }

    /// Returns a copy of all fields.
    pub(super) fn object(self) -> Map<String, Value> {
        self.value.as_object().cloned().unwrap_or_default()
    }

    /// Returns the fields of an object in place of this one.
    pub(super) fn of(self, value: &'a Value) -> Self {
        Self { value, ..self }
    }

    /// Returns a number. `None` if it is missing or `null`.
    pub(super) fn optional(self, key: &str) -> Result<Option<u64>> {
        self.read(key, "a whole number", Value::as_u64)
    }

    /// Returns a number: 0 if the field is `null`, and this default if it is missing.
    pub(super) fn number_or_null(self, key: &str, absent: u64) -> Result<u64> {
        let default = if self.get(key).is_none() { absent } else { 0 };
        if default > 0 { self.number(key, default) } else { Ok(self.optional(key)?.unwrap_or(0)) }
    }

    /// Returns a number of blocks if it is not too large.
    pub(super) fn blocks(key: &str, layers: u64) -> Result<usize> {
        let few = usize::try_from(layers).ok().filter(|_| layers <= MOST_BLOCKS);
        few.ok_or_else(|| wrong(format!("`{key}` is {layers}; a model of at most {MOST_BLOCKS} blocks is estimated")))
    }

    pub(super) fn fraction(self, key: &str, default: f64) -> Result<f64> {
        Ok(self.read(key, "a number", Value::as_f64)?.unwrap_or(default))
    }

    pub(super) fn flag(self, key: &str, default: bool) -> Result<bool> {
        Ok(self.read(key, "a boolean", Value::as_bool)?.unwrap_or(default))
    }

    pub(super) fn text(self, key: &str, default: &'a str) -> Result<&'a str> {
        Ok(self.read(key, "a text", Value::as_str)?.unwrap_or(default))
    }

    pub(super) fn list(self, key: &str) -> Result<Option<&'a [Value]>> {
        Ok(self.read(key, "a list", Value::as_array)?.map(Vec::as_slice))
    }

    /// Returns a list of integers. `None` if it is missing or `null`.
    pub(super) fn numbers(self, key: &str) -> Result<Option<Vec<u64>>> {
        let number = |value: &Value| {
            value.as_u64().ok_or_else(|| wrong(format!("`{key}` has {value}, which is not a whole number")))
        };
        self.list(key)?.map(|list| list.iter().map(number).collect()).transpose()
    }

    /// Returns the fields of an inner object; none if it is missing.
    pub(super) fn inner(self, key: &'a str) -> Fields<'a> {
        Fields { value: &self.value[key], inside: Some(key), ..self }
    }

    /// Checks a setting that changes the layers. Only the value that the builders support is allowed.
    pub(super) fn is(self, key: &str, known: impl Into<Value>) -> Result<()> {
        let known = known.into();
        match self.known(key) {
            Some(value) if *value != known && value.as_f64() != known.as_f64().or(Some(f64::NAN)) => {
                Err(wrong(format!("`{key}` is {value}; only {known} is supported")))
            }
            _ => Ok(()),
        }
    }

    /// Checks a setting that must be false or 0.
    pub(super) fn is_off(self, key: &str) -> Result<()> {
        self.is(key, if self.known(key).is_some_and(Value::is_number) { Value::from(0) } else { Value::from(false) })
    }

    /// Returns the operation for a name in transformers' `ACT2FN`.
    pub(super) fn function(self, key: &str, default: &'a str) -> Result<Function> {
        let name = self.text(key, default)?;
        serde_json::from_value(name.into()).map_err(|_| wrong(format!("`{key}` is \"{name}\", which is not supported")))
    }
}
