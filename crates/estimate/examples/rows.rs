//! Prints the estimates of the rows in a file such as `measure/h200.jsonl`, which `measure/measure.py` measures: one JSON object
//! for each row. Arguments: the file, and parts of the names of rows; without them, all rows.

use serde_json::json;

#[path = "../measure/rows.rs"]
mod rows;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("the first argument is a file with rows")?;
    let requested: Vec<_> = arguments.collect();
    for row in rows::read(&std::fs::read_to_string(path)?) {
        let name = row["row"].as_str().unwrap_or_default();
        if requested.is_empty() || requested.iter().any(|part| name.contains(part.as_str())) {
            let (model, step) = rows::parse(&row);
            println!("{}", json!({"row": name, "estimate": step.estimate(&model)?}));
        }
    }
    Ok(())
}
