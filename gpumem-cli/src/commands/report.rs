//! Shows what a recording has.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use clap::Args;
use gpumem_core::export::{InPaint, Paint};
use serde_json::json;

use crate::{
    exit::Exit,
    failure::Failure,
    history::{History, Moment},
    report::{
        json, moment,
        overview::{Missing, Overview},
        places, summary,
    },
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem report train.capture                      the peak, what it consisted of, what was not freed
  gpumem report --tree train.capture               each scope: peak, still in use, total
  gpumem report --at 12.5s train.capture           what was live then
  gpumem report --between start peak train.capture
  gpumem report rank-*.capture                     several ranks, side by side
  gpumem report --json train.capture | jq '.devices[0].peak_bytes'";

/// Shows what a recording has: the peak, what it consisted of, what was not freed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Recordings, as `gpumem run` and `GPUMEM_CAPTURE` write them.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    view: View,
    /// As JSON: bytes are exact, and what was not measured is null.
    #[arg(long)]
    json: bool,
}

/// What is shown instead of the summary.
#[derive(Debug, Default, Args)]
#[group(multiple = false)]
struct View {
    /// Each scope: its peak, its part of the peak of the process, what is still in use, all that was allocated.
    #[arg(long)]
    tree: bool,
    /// Each place: what it has at the peak and at the end, all that it allocated.
    #[arg(long)]
    table: bool,
    /// What was not freed.
    #[arg(long)]
    leaks: bool,
    /// What was live at a moment: peak, start, end, or a time since the start such as 12.5s or 300ms.
    #[arg(long, value_name = "MOMENT")]
    at: Option<Moment>,
    /// What came and went between two moments.
    #[arg(long, value_names = ["MOMENT", "MOMENT"], num_args = 2)]
    between: Option<Vec<Moment>>,
}

impl View {
    fn is_summary(&self) -> bool {
        let Self { tree, table, leaks, at, between } = self;
        !(*tree || *table || *leaks) && at.is_none() && between.is_none()
    }
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    let paint = terminal::paint();
    let missing = if arguments.view.is_summary() {
        let overviews = arguments.files.iter().map(|file| Overview::read(file)).collect::<Result<Vec<_>, _>>()?;
        terminal::print(|out| match (&*overviews, arguments.json) {
            ([only], true) => json::write(only, out),
            (several, true) => json::write(&several, out),
            (overviews, false) => summary::write_all(overviews, out, paint),
        })?;
        overviews.into_iter().map(|overview| (overview.file, overview.missing)).collect()
    } else {
        let mut missing = Vec::new();
        let mut objects = Vec::new();
        for (at, file) in arguments.files.iter().enumerate() {
            let mut history = History::read(file)?;
            if arguments.json {
                objects.push(object(&mut history, &arguments.view));
            } else {
                terminal::print(|out| {
                    if arguments.files.len() > 1 {
                        writeln!(out, "{}{}:", if at > 0 { "\n" } else { "" }, file.display())?;
                    }
                    write(&mut history, &arguments.view, out, paint)
                })?;
            }
            missing.push((file.display().to_string(), Missing::of(&history)));
        }
        if arguments.json {
            terminal::print(|out| match &*objects {
                [only] => json::write(only, out),
                several => json::write(&several, out),
            })?;
        }
        missing
    };
    Ok(exit_of(&missing))
}

/// What is missing in files that end too early is an error on stderr too.
pub(crate) fn exit_of(missing: &[(String, Missing)]) -> Exit {
    let mut exit = Exit::Done;
    for (file, missing) in missing {
        if let Some(why) = &missing.incomplete {
            let next = "the report covers what comes before";
            terminal::error(&Failure::new(format!("`{file}` has no end"), why, next));
            exit = Exit::Failed;
        }
    }
    exit
}

/// The scopes with their figures; `None` if the recording is too large for that.
fn write(history: &mut History, view: &View, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    const TOO_LARGE: &str = "the recording has too many paths of scopes for this report";
    if view.tree {
        match history.reader().summary() {
            Some(summary) => writeln!(out, "{}", InPaint(&summary, paint)),
            None => writeln!(out, "{TOO_LARGE}"),
        }
    } else if view.leaks {
        match history.reader().leaks() {
            Some(leaks) => writeln!(out, "{}", InPaint(&leaks, paint)),
            None => writeln!(out, "{TOO_LARGE}"),
        }
    } else if let Some(at) = view.at {
        moment::write_at(history, at, out, paint)
    } else if let Some([from, to]) = view.between.as_deref() {
        moment::write_between(history, [*from, *to], out, paint)
    } else {
        places::write(history, out, paint)
    }
}

fn object(history: &mut History, view: &View) -> serde_json::Value {
    let file = history.path.display().to_string();
    let missing = Missing::of(history);
    let (name, report) = if view.tree {
        ("scopes", json!(history.reader().summary().map(|summary| scopes(&summary))))
    } else if view.leaks {
        ("not_freed", json!(Overview::of(history).not_freed))
    } else if let Some(at) = view.at {
        ("devices", json!(moment::at(history, at)))
    } else if let Some([from, to]) = view.between.as_deref() {
        ("devices", json!(moment::between(history, *from, *to)))
    } else {
        ("places", json!(places::places(history)))
    };
    json!({ "file": file, name: report, "missing": missing })
}

fn scopes(summary: &gpumem_core::report::Summary) -> Vec<serde_json::Value> {
    let scope = |scope: &gpumem_core::report::ScopeSummary| {
        json!({
            "scope": scope.path,
            "opened_at": scope.place,
            "device": scope.device,
            "simulated": scope.simulated,
            "calls": scope.calls,
            "peak_bytes": scope.peak.get(),
            "at_peak_bytes": scope.at_peak.get(),
            "device_peak_bytes": scope.device_peak.get(),
            "used_bytes": scope.used.get(),
            "allocated_bytes": scope.allocated.get(),
            "allocations": scope.allocations,
        })
    };
    summary.scopes.iter().map(scope).collect()
}
