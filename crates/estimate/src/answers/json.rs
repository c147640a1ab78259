//! Writes results as JSON.

use gpumem_core::model::Bytes;
use serde_json::{Map, Value, json};

use crate::estimate::Estimate;

impl Estimate {
    /// Returns the estimate as a JSON object. Amounts are in bytes; `sizes` contains the main ones in MiB (2^20 bytes)
    /// as well.
    pub fn to_json(&self) -> String {
        let mut object = match serde_json::to_value(self) {
            Ok(Value::Object(object)) => object,
            // All fields are numbers, texts and lists of these, so this cannot fail.
            _ => Map::new(),
        };
        let classes = self.classes().into_iter().map(|(class, bytes)| (class.name().to_owned(), json!(bytes)));
        object.insert("classes".to_owned(), Value::Object(classes.collect()));
        let mut sizes = vec![("peak", self.peak), ("reserved", self.reserved), ("parameters", self.parameter_bytes)];
        if let Some(workspaces) = self.convolutions {
            sizes.push(("peak_with_largest_workspaces", workspaces.peak));
            sizes.push(("reserved_with_largest_workspaces", workspaces.reserved));
        }
        let sizes = sizes.into_iter().map(|(name, bytes)| (name.to_owned(), size(bytes)));
        object.insert("sizes".to_owned(), Value::Object(sizes.collect()));
        Value::Object(object).to_string()
    }
}

#[expect(clippy::cast_precision_loss, reason = "the exact number of bytes is beside it")]
fn size(bytes: Bytes) -> Value {
    json!({"bytes": bytes, "mib": bytes.get() as f64 / f64::from(1 << 20)})
}
