//! The sizes of contexts are those that `measure/context.py` measured.

use gpumem_core::model::Bytes;
use gpumem_estimate::ContextSize;
use serde_json::Value;

#[test]
fn the_range_is_what_was_measured() {
    let lines = include_str!("../measure/context.jsonl").lines();
    let rows: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect("a process")).collect();
    let sizes = rows.iter().flat_map(|row| {
        assert_eq!(row["capability"], serde_json::json!([9, 0]));
        row["beyond"].as_object().expect("stages").values().filter_map(Value::as_u64)
    });
    let sizes: Vec<_> = sizes.map(Bytes::new).collect();
    let context = ContextSize::measured((9, 0)).expect("it was measured");
    assert_eq!(sizes.iter().min(), Some(&context.low));
    assert_eq!(sizes.iter().max(), Some(&context.high));
    assert_eq!(ContextSize::measured((8, 0)), None, "nothing is guessed");
}
