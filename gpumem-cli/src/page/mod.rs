//! `gpumem report --html`: one page with all that it needs. It loads nothing from a network, and its policy forbids it to.
//!
//! `page.js` says how the data are laid out and drawn. They have every event: what is drawn at a zoom is chosen in the page.

mod data;

use std::io::{self, Write};

use gpumem_core::model::one_line;
use serde_json::{Value, json};

use self::data::Recording;
use crate::history::History;

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The recordings of a page. Each is read, put into its form and dropped.
#[derive(Default)]
pub(crate) struct Page {
    recordings: Vec<Recording>,
}

impl Page {
    pub(crate) fn add(&mut self, history: &mut History) -> io::Result<()> {
        self.recordings.push(Recording::of(history)?);
        Ok(())
    }

    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let about: Vec<_> = self.recordings.iter().map(|recording| printable(&recording.about)).collect();
        let about = json!({ "version": env!("CARGO_PKG_VERSION"), "recordings": about });
        // In a script, only `<` could end it.
        let about = about.to_string().replace('<', "\\u003c");
        for part in HTML.split_inclusive("-->") {
            let (text, name) = part.rsplit_once("<!--").unwrap_or((part, ""));
            out.write_all(text.as_bytes())?;
            match name.trim_end_matches("-->") {
                "style" => out.write_all(STYLE.as_bytes())?,
                "about" => out.write_all(about.as_bytes())?,
                "script" => out.write_all(SCRIPT.as_bytes())?,
                "data" => {
                    for (number, recording) in self.recordings.iter().enumerate() {
                        write_data(&format!("data-{number}"), &recording.data, out)?;
                        if let Some(tensors) = &recording.tensors {
                            write_data(&format!("tensors-{number}"), tensors, out)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// A page is text for people: its names are shown as in a terminal.
fn printable(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(one_line(text).into_owned()),
        Value::Array(all) => all.iter().map(printable).collect(),
        Value::Object(all) => all.iter().map(|(name, value)| (name.clone(), printable(value))).collect(),
        other => other.clone(),
    }
}

fn write_data(id: &str, data: &str, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "<script type=\"text/plain\" id=\"{id}\">{data}</script>")
}
