//! This target writes a document of JSON as a pickle, and reads it back.

#![no_main]

use std::io;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;

#[path = "../../crates/cli/src/formats/pickle.rs"]
mod pickle;
#[path = "../../crates/cli/tests/command/pickled.rs"]
mod pickled;
mod seeds;

use self::pickle::Pickle;

/// These keys are written like names of fields.
const WORDS: [&str; 3] = ["action", "addr", "frames"];

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let Ok(document) = serde_json::from_slice(data) else { return };
    let mut file = Vec::new();
    let written = Pickle::new(&mut file).and_then(|mut pickle| {
        let is_known = put(&mut pickle, &document)?;
        pickle.end()?;
        Ok(is_known)
    });
    if written.expect("memory can be written") {
        assert_eq!(pickled::unpickled(&file), document);
    }
});

/// Returns false if the document has values that the command does not write: other numbers, booleans and null.
fn put(pickle: &mut Pickle<'_>, value: &Value) -> io::Result<bool> {
    let mut is_known = true;
    match value {
        Value::String(text) => pickle.text(text)?,
        Value::Number(number) if number.is_u64() => pickle.number(number.as_u64().unwrap_or_default())?,
        Value::Array(values) => {
            pickle.begin_list()?;
            for (number, value) in values.iter().enumerate() {
                pickle.append_part(number)?;
                is_known &= put(pickle, value)?;
            }
            pickle.append()?;
        }
        Value::Object(fields) => {
            // A dictionary is written at once, and the web viewer cannot read more.
            is_known &= fields.len() <= 500;
            pickle.begin_dictionary()?;
            for (key, value) in fields {
                match WORDS.iter().find(|word| *word == key) {
                    Some(word) => pickle.word(word)?,
                    None => pickle.text(key)?,
                }
                is_known &= put(pickle, value)?;
            }
            pickle.set()?;
        }
        _ => is_known = false,
    }
    Ok(is_known)
}

fn write_seeds() {
    let documents = [
        r#"{"action":"alloc","addr":140000000000,"frames":[{"name":"a","line":12},{"name":"a","line":65536}]}"#,
        r#"[0,255,256,2147483647,2147483648,18446744073709551615,"","é",[],{}]"#,
    ];
    seeds::write("pickles", documents.map(|document| document.as_bytes().to_vec()));
}
