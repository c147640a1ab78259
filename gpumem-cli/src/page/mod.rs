//! `gpumem report --html`: one page with all that it needs. It loads nothing from a network, and its policy forbids it to.
//!
//! `page.js` says how the data are laid out and drawn. They have every event: what is drawn at a zoom is chosen in the page.

mod data;
mod script;

use std::io::{self, Write};

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
    pub(crate) fn add(&mut self, history: &History) -> io::Result<()> {
        self.recordings.push(Recording::of(history)?);
        Ok(())
    }

    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        for part in HTML.split_inclusive("-->") {
            let (text, name) = part.rsplit_once("<!--").unwrap_or((part, ""));
            out.write_all(text.as_bytes())?;
            match name.trim_end_matches("-->") {
                "style" => out.write_all(STYLE.as_bytes())?,
                "about" => self.write_about(out)?,
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

    fn write_about(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{{\"version\":\"{}\",\"recordings\":[", env!("CARGO_PKG_VERSION"))?;
        for (number, Recording { about, .. }) in self.recordings.iter().enumerate() {
            write!(out, "{}{about}", if number > 0 { "," } else { "" })?;
        }
        write!(out, "]}}")
    }
}

fn write_data(id: &str, data: &str, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "<script type=\"text/plain\" id=\"{id}\">{data}</script>")
}
