//! Writes results as JSON.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::estimate::Estimate;

impl Estimate {
    /// Returns the estimate as a JSON object. Amounts are in bytes.
    pub fn to_json(&self) -> String {
        // The conversion sorts the keys by name.
        serde_json::to_value(self).unwrap_or_default().to_string()
    }
}

/// This is not derived, because the peak by class is not a field.
impl Serialize for Estimate {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { parameters, parameter_bytes, peak, parts, reserved, phases, optimizer, convolutions } = self;
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("parameters", parameters)?;
        map.serialize_entry("parameter_bytes", parameter_bytes)?;
        map.serialize_entry("peak", peak)?;
        map.serialize_entry("classes", &BTreeMap::from_iter(self.classes()))?;
        map.serialize_entry("parts", parts)?;
        map.serialize_entry("reserved", reserved)?;
        map.serialize_entry("phases", phases)?;
        map.serialize_entry("optimizer", optimizer)?;
        map.serialize_entry("convolutions", convolutions)?;
        map.end()
    }
}
