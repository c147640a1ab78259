//! Prints the estimates of the rows that `measure/measure.py` measures: one JSON object for each row. Arguments: `--blind` for the rows
//! that were measured last, and parts of the names of rows; without them, all rows.

use serde_json::{Value, json};

#[path = "../measure/rows.rs"]
mod rows;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (options, requested): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let names: Vec<String> = if options.iter().any(|option| option == "--blind") {
        include_str!("../measure/blind.txt").lines().map(str::to_owned).collect()
    } else {
        let lines = include_str!("../measure/h200.jsonl").lines();
        let rows = lines.map(|line| {
            let row: Value = serde_json::from_str(line)?;
            Ok::<_, serde_json::Error>(row["row"].as_str().unwrap_or_default().to_owned())
        });
        rows.collect::<Result<_, _>>()?
    };
    for name in
        names.iter().filter(|name| requested.is_empty() || requested.iter().any(|part| name.contains(part.as_str())))
    {
        let (model, step) = rows::parse(name).ok_or_else(|| format!("there is no row {name}"))?;
        let estimate = step.estimate(&model)?;
        let classes: Vec<_> = estimate.classes().iter().map(|(class, bytes)| (class.name(), bytes.get())).collect();
        let phases: Vec<_> = estimate.phases.iter().map(|phase| (phase.name, phase.peak.get())).collect();
        let convolutions = estimate.convolutions.map(|workspace| {
            json!({"high": workspace.high.get(), "peak": workspace.peak.get(), "reserved": workspace.reserved.get()})
        });
        let line = json!({
            "row": name,
            "parameters": estimate.parameters,
            "peak": estimate.peak.get(),
            "reserved": estimate.reserved.get(),
            "classes": classes,
            "phases": phases,
            "convolutions": convolutions,
        });
        println!("{line}");
    }
    Ok(())
}
