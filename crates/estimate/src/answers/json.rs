//! Writes results as JSON.

use serde_json::{Map, Value, json};

use crate::estimate::Estimate;

impl Estimate {
    /// Returns the estimate as a JSON object. Amounts are in bytes.
    pub fn to_json(&self) -> String {
        let mut object = match serde_json::to_value(self) {
            Ok(Value::Object(object)) => object,
            // All fields are numbers, texts and lists of these, so this cannot fail.
            _ => Map::new(),
        };
        let classes = self.classes().into_iter().map(|(class, bytes)| (class.name().to_owned(), json!(bytes)));
        object.insert("classes".to_owned(), Value::Object(classes.collect()));
        Value::Object(object).to_string()
    }
}
