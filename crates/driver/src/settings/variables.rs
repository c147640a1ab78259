//! The list of the environment variables.

use std::{ffi::OsStr, time::Duration};

use super::{
    cards::card,
    filter::Filter,
    parse::{InvalidValue, flag, invalid, lower, not_one_of, path, unless_auto, value},
    values::{Card, DRY, GAUGE, LIMIT, SIM, SOURCE, Settings, Stacks},
};
use crate::{
    export::Sink,
    model::{Bytes, Gauge, Source, Threads},
};

/// The size of the smallest simulated device: one page of a GPU.
const PAGE: Bytes = Bytes::mib(2);

/// One environment variable.
pub(super) struct Variable {
    pub(super) name: &'static str,
    /// The effect of the variable.
    pub(super) meaning: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "a test compares the book with it"))]
    pub(super) values: &'static str,
    pub(super) default: &'static str,
    /// Parses and stores a value that is not empty. Returns its meaning.
    pub(super) read: fn(&OsStr, &mut Settings) -> Result<String, InvalidValue>,
}

/// All variables, in the order of `docs/book/src/environment.md`.
pub(super) const VARIABLES: &[Variable] = &[
    Variable {
        name: "GPUMEM_REPORT",
        meaning: "where output goes, unless the program calls `set_sink`",
        values: "`stdout`, `stderr`, `file:PATH`, `json`, `json:PATH`, `off`: see [Outputs](output.md)",
        default: "`stdout`",
        read: |text, settings| {
            let instead = "output goes to stdout and stderr, unless the program calls set_sink";
            let Some(name) = text.to_str() else {
                return invalid(format!("{} is not UTF-8", value(text)), instead);
            };
            settings.report = name.parse::<Sink>().or_else(|error| invalid(error.to_string(), instead))?;
            Ok(settings.report.to_string())
        },
    },
    Variable {
        name: "GPUMEM",
        meaning: "which lines traces print",
        values: "[directives](output.md#less-output) such as `off,train=lines,forward>=10MiB,every=100`",
        default: "all",
        read: |text, settings| {
            let text = text.to_string_lossy();
            let (filter, bad) = Filter::parse(&text);
            settings.filter = filter;
            if bad.is_empty() {
                return Ok(text.trim().to_owned());
            }
            let more = bad.len().checked_sub(SHOWN).filter(|more| *more > 0).map(|more| format!("and {more} more"));
            let shown: Vec<_> = bad.iter().take(SHOWN).map(ToString::to_string).chain(more).collect();
            invalid(shown.join("; "), "wrong directives are left out")
        },
    },
    Variable {
        name: "NO_COLOR",
        meaning: "disables colours",
        values: "any value",
        default: "colours on a terminal",
        read: |text, settings| {
            settings.no_color = true;
            Ok(text.to_string_lossy().into_owned())
        },
    },
    Variable {
        name: GAUGE,
        meaning: "how a trace measures, unless the program chooses its gauge",
        values: "`auto` (the best that works), `exact`, `sampled`, `off`",
        default: "`auto`",
        read: |text, settings| {
            let instead = "traces are off, unless the program chooses their gauge";
            settings.gauge = unless_auto(text, instead)?;
            Ok(settings.gauge.map_or("auto", Gauge::name).to_owned())
        },
    },
    Variable {
        name: SOURCE,
        meaning: "how allocations are intercepted, unless the program chooses the source",
        values: "`auto`: the dispatch table, otherwise CUPTI, otherwise sampling; `dispatch` or `cupti`: only that one, otherwise \
                 sampling",
        default: "`auto`",
        read: |text, settings| {
            let instead = "traces are sampled, and shorter peaks are missed, unless the program chooses the source";
            settings.source = unless_auto(text, instead)?;
            Ok(settings.source.map_or("auto", Source::name).to_owned())
        },
    },
    Variable {
        name: "GPUMEM_SAMPLE_MS",
        meaning: "milliseconds between two readings of a sampled trace",
        values: "a whole number from 1 to 4294967295",
        default: "`1`",
        read: |text, settings| {
            let Some(every @ 1..) = text.to_str().and_then(|text| text.trim().parse::<u32>().ok()) else {
                let detail = format!("{} is not a whole number of milliseconds from 1 to 4294967295", value(text));
                return invalid(detail, "readings are 1 ms apart");
            };
            settings.sample_every = Duration::from_millis(every.into());
            Ok(every.to_string())
        },
    },
    Variable {
        name: "GPUMEM_ADOPT",
        meaning: "which threads without a scope count for another thread's scope, unless the program chooses them",
        values: "a prefix of the thread names; `*`: all threads without a scope",
        default: "none",
        read: |text, settings| {
            let prefix = text.to_string_lossy();
            settings.adopt = Some(if prefix == "*" { Threads::Unscoped } else { Threads::named(&prefix) });
            Ok(prefix.into_owned())
        },
    },
    Variable {
        name: "GPUMEM_CUPTI",
        meaning: "where `libcupti` is, if CUPTI is used",
        values: "the path of the file, or of its folder",
        default: "found through the loader's search path, in `CUDA_HOME`, `CUDA_PATH` and `/usr/local/cuda*`, and among the Python \
                  packages of the active environment",
        read: |text, settings| Ok(path(text, &mut settings.cupti)),
    },
    Variable {
        name: "GPUMEM_BACKTRACE",
        meaning: "the allocations whose stack is recorded",
        values: "`1`: all; `0`: none; `auto`: those of 1 MiB or more; `python`: those of 1 MiB or more, with Python lines \
                 (3.11 to 3.15 on Linux)",
        default: "`auto`",
        read: |text, settings| {
            let (stacks, name) = match &*lower(text) {
                "auto" => (Stacks::Large, "auto"),
                "python" => (Stacks::Python, "python"),
                "0" | "off" => (Stacks::None, "none"),
                "1" | "on" | "full" => (Stacks::All, "all"),
                _ => return invalid(not_one_of(text, "1, 0, auto or python"), "stacks of large blocks are recorded"),
            };
            settings.stacks = stacks;
            Ok(name.to_owned())
        },
    },
    Variable {
        name: "GPUMEM_LEAKS",
        meaning: "at the end of the process, report the memory that was not freed",
        values: "`1`, `0`",
        default: "`0`",
        read: |text, settings| flag(text, &mut settings.leaks),
    },
    Variable {
        name: "GPUMEM_PEAK",
        meaning: "at the end of the process, report what made up each device's peak, by scope and line",
        values: "`1`, `0`",
        default: "`0`",
        read: |text, settings| flag(text, &mut settings.peak),
    },
    Variable {
        name: "GPUMEM_CAPTURE",
        meaning: "record the session to this file (feature `capture`); an existing recording is replaced",
        values: "a path; `%p` becomes the process id",
        default: "none",
        read: |text, settings| {
            if !cfg!(feature = "capture") {
                let detail = "this build cannot record; add gpumem's feature `capture` in the program's Cargo.toml";
                return invalid(detail.to_owned(), "the session is not recorded");
            }
            Ok(path(text, &mut settings.recording))
        },
    },
    Variable {
        name: "GPUMEM_BUDGETS",
        meaning: "how to treat a budget that cannot be measured, or is not known",
        values: "`skip`: print a line to stderr and continue",
        default: "the budget fails; a function whose budget cannot be measured prints one notice",
        read: |text, settings| {
            if lower(text) != "skip" {
                return invalid(format!("{} is not `skip`", value(text)), "budgets are enforced");
            }
            settings.skip_budgets = true;
            Ok("skip".to_owned())
        },
    },
    Variable {
        name: "GPUMEM_BASELINE",
        meaning: "the file that stores the tests' previous peaks (feature `baseline`)",
        values: "a path",
        default: "none",
        read: |text, settings| Ok(path(text, &mut settings.baseline)),
    },
    Variable {
        name: "GPUMEM_BASELINE_UPDATE",
        meaning: "write the tests' peaks to that file instead of comparing them",
        values: "`1`, `0`",
        default: "`0`",
        read: |text, settings| flag(text, &mut settings.update_baseline),
    },
    Variable {
        name: SIM,
        meaning: "simulated devices instead of real ones (feature `sim`)",
        values: "the memory of each, such as `16GiB` or `16GiB,8GiB`",
        default: "none",
        read: |text, settings| {
            if !cfg!(feature = "sim") {
                let detail =
                    "this build has no simulated devices; add gpumem's feature `sim` in the program's Cargo.toml";
                return invalid(detail.to_owned(), "the real devices are used");
            }
            let instead = "traces are off";
            let list = text.to_string_lossy();
            let totals: Result<Vec<Bytes>, _> = list.split(',').map(str::parse).collect();
            let whole = if list.contains(',') { format!(" (in {})", value(text)) } else { String::new() };
            settings.sim = totals.or_else(|error| invalid(format!("{error}{whole}"), instead))?;
            if let Some(total) = settings.sim.iter().find(|total| **total < PAGE) {
                let detail = format!("{total} is less than a page of a GPU ({PAGE}); write a unit, such as 16GiB");
                return invalid(detail, instead);
            }
            Ok(settings.sim.iter().map(Bytes::to_string).collect::<Vec<_>>().join(", "))
        },
    },
    Variable {
        name: DRY,
        meaning: "a dry run: the program allocates as it would on this GPU, but skips large computations (feature `dry`)",
        values: CARDS,
        default: "none",
        read: |text, settings| replace_card(DRY, text, settings),
    },
    Variable {
        name: LIMIT,
        meaning: "a smaller GPU: the program runs normally, but gets no more memory than this GPU has (feature `dry`)",
        values: CARDS,
        default: "none",
        read: |text, settings| replace_card(LIMIT, text, settings),
    },
];

/// The maximum number of wrong directives that are shown.
const SHOWN: usize = 4;

const CARDS: &str = "a size such as `24GiB`, or the name of a GPU";

fn replace_card(variable: &'static str, text: &OsStr, settings: &mut Settings) -> Result<String, InvalidValue> {
    let instead = "gpumem measures nothing, and the program uses the real GPU";
    if settings.card.is_some() {
        return invalid(format!("{DRY} is set as well; unset one of them"), instead);
    }
    let size = card(text.to_string_lossy().trim()).or_else(|why| invalid(why, instead))?;
    settings.card = Some(Card { variable, size, is_dry: variable == DRY });
    Ok(size.to_string())
}
