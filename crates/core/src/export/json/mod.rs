//! Writes everything that gpumem prints or returns as JSON. Bytes are exact, and a value that was not measured is
//! `null`.

mod object;
mod output;
mod reports;

use serde_core::Serialize;

use super::JsonEscapes;

/// Returns the value as one line of JSON, without a line break.
pub fn json_line(value: &(impl Serialize + ?Sized)) -> String {
    let mut text = Vec::new();
    // Cannot fail: no value has a map whose keys are not texts or numbers, and writing to memory succeeds.
    _ = serde_json::to_writer(JsonEscapes(&mut text), value);
    String::from_utf8(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::json_line;
    use crate::{
        export::{memory_stats::tests::statistics, samples},
        report::{MemoryStats, Output},
    };

    /// The file beside this one has a line for each sample. A new key or another order is a change for the programs that read it.
    #[test]
    fn each_report_has_its_line() {
        const NAME: &str = "a \"b\"\n";
        let time = UNIX_EPOCH + Duration::from_secs(1_537_019_943);
        let outputs = samples::contents(NAME).into_iter().map(|content| {
            let mut output = Output::new(content, time, 7);
            (output.thread, output.thread_name, output.module) = (Some(3), Some(NAME.into()), Some(NAME.into()));
            json_line(&output)
        });
        let mut lines: Vec<String> = outputs.collect();
        let stats = statistics();
        lines.extend([
            samples::summary(NAME).to_json(),
            samples::breakdown(NAME).to_json(),
            stats.to_json(),
            MemoryStats { reserved: None, ..stats }.to_json(),
            samples::block(NAME).to_json(),
        ]);
        let text = lines.join("\n") + "\n";
        assert!(text == include_str!("golden.jsonl"), "\n{text}");
    }
}
