//! The environment variables of gpumem: one list, read once for each process.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt::{self, Display},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use once_cell::race::OnceBox;

use crate::{
    error::{Error, Kind, Result},
    export::Sink,
    model::{Bytes, Gauge, Source},
};

/// The smallest simulated device: a page of a GPU.
const PAGE: Bytes = Bytes::mib(2);

/// One environment variable.
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    /// What it decides.
    pub(crate) meaning: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "only the table in the book has it so far"))]
    pub(crate) values: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "as above"))]
    pub(crate) default: &'static str,
    /// Stores a value that is not empty, and returns what it stands for.
    read: fn(&OsStr, &mut Settings) -> Result<String, Refused>,
}

/// Why a value cannot be used.
struct Refused {
    detail: String,
    /// What happens instead.
    instead: &'static str,
}

/// All variables, in the order of `docs/book/src/environment.md`.
pub(crate) const VARIABLES: &[Variable] = &[
    Variable {
        name: "GPUMEM_REPORT",
        meaning: "where output goes, unless the program calls `set_sink`",
        values: "`stdout` (reports of traces and trackers; all else goes to stderr), `stderr`, `file:PATH` (added at its end), `json` (one object per line on stdout, in bytes), `json:PATH`, `off` (nothing)",
        default: "`stdout`",
        read: |text, settings| {
            let instead = "output goes to stdout and stderr, unless the program calls set_sink";
            let Some(name) = text.to_str() else {
                return refuse(format!("`{}` is not UTF-8", text.display()), instead);
            };
            settings.report = name.parse::<Sink>().or_else(|error| refuse(error.to_string(), instead))?;
            Ok(settings.report.to_string())
        },
    },
    Variable {
        name: "NO_COLOR",
        meaning: "output to a terminal has no colours",
        values: "any",
        default: "colours, if it is a terminal",
        read: |text, settings| {
            settings.no_color = true;
            Ok(text.to_string_lossy().into_owned())
        },
    },
    Variable {
        name: GAUGE,
        meaning: "how a trace measures, unless the program chooses its gauge",
        values: "`auto` (the best that works), `exact`, `pool`, `sampled`, `off`",
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
        values: "`auto`: the dispatch table, else CUPTI, else sampling; `dispatch`, `cupti`: this one, else sampling",
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
                let detail = format!("`{}` is not a whole number of milliseconds from 1 to 4294967295", text.display());
                return refuse(detail, "readings are 1 ms apart");
            };
            settings.sample_every = Duration::from_millis(every.into());
            Ok(every.to_string())
        },
    },
    Variable {
        name: "GPUMEM_CUPTI",
        meaning: "where `libcupti` is, if CUPTI is used",
        values: "the path of the file, or of its folder",
        default: "searched on the loader's path, in `CUDA_HOME`, `CUDA_PATH` and `/usr/local/cuda*`, and among the Python \
                  packages of the active environment",
        read: |text, settings| Ok(path(text, &mut settings.cupti)),
    },
    Variable {
        name: "GPUMEM_BACKTRACE",
        meaning: "the allocations whose stack is recorded",
        values: "`1`: all; `0`: none; `auto`: those of 1 MiB or more",
        default: "`auto`",
        read: |text, settings| {
            let (stacks, name) = match &*lower(text) {
                "auto" => (Stacks::Large, "auto"),
                "0" | "off" => (Stacks::None, "none"),
                "1" | "on" | "full" => (Stacks::All, "all"),
                _ => return refuse(not_one_of(text, "1, 0 or auto"), "stacks of large blocks are recorded"),
            };
            settings.stacks = stacks;
            Ok(name.to_owned())
        },
    },
    Variable {
        name: "GPUMEM_LEAKS",
        meaning: "report at the end of the process what was not freed",
        values: "`1`, `0`",
        default: "`0`",
        read: |text, settings| flag(text, &mut settings.leaks),
    },
    Variable {
        name: "GPUMEM_PEAK",
        meaning: "report at the end of the process which allocations made the peak of each device, by scope and line",
        values: "`1`, `0`",
        default: "`0`",
        read: |text, settings| flag(text, &mut settings.peak),
    },
    Variable {
        name: "GPUMEM_CAPTURE",
        meaning: "record the session to this file (feature `capture`); an existing file is replaced",
        values: "a path, in which `%p` stands for the number of the process",
        default: "none",
        read: |text, settings| {
            if !cfg!(feature = "capture") {
                let detail = "this build cannot record; enable the feature `capture`";
                return refuse(detail.to_owned(), "the session is not recorded");
            }
            Ok(path(text, &mut settings.capture))
        },
    },
    Variable {
        name: "GPUMEM_BUDGETS",
        meaning: "what happens to a budget that cannot be measured",
        values: "`skip`: a line on stderr says so, and the program goes on",
        default: "an assertion or a test fails; a function prints one notice and goes on",
        read: |text, settings| {
            if lower(text) != "skip" {
                return refuse(format!("`{}` is not `skip`", text.display()), "budgets are held");
            }
            settings.skip_budgets = true;
            Ok("skip".to_owned())
        },
    },
    Variable {
        name: "GPUMEM_BASELINE",
        meaning: "the file with the earlier peaks of tests (feature `baseline`)",
        values: "a path",
        default: "none",
        read: |text, settings| Ok(path(text, &mut settings.baseline)),
    },
    Variable {
        name: "GPUMEM_BASELINE_UPDATE",
        meaning: "write the peaks of tests to that file, instead of comparing them",
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
                let detail = "this build has no simulated devices; enable the feature `sim`";
                return refuse(detail.to_owned(), "the real devices are used");
            }
            let instead = "traces are off";
            let said = text.to_string_lossy();
            let totals: Result<Vec<Bytes>, _> = said.split(',').map(str::parse).collect();
            let whole = if said.contains(',') { format!(" (it says `{said}`)") } else { String::new() };
            settings.sim = totals.or_else(|error| refuse(format!("{error}{whole}"), instead))?;
            if let Some(total) = settings.sim.iter().find(|total| **total < PAGE) {
                let detail = format!("{total} is less than a page of a GPU ({PAGE}); write a unit, such as 16GiB");
                return refuse(detail, instead);
            }
            Ok(settings.sim.iter().map(Bytes::to_string).collect::<Vec<_>>().join(", "))
        },
    },
];

const GAUGE: &str = "GPUMEM_GAUGE";
const SOURCE: &str = "GPUMEM_SOURCE";
const SIM: &str = "GPUMEM_SIM";

/// The allocations whose stack is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stacks {
    #[default]
    Large,
    All,
    None,
}

/// What all variables say. A value that cannot be used leaves the default, and a problem.
#[expect(clippy::struct_excessive_bools, reason = "each is a variable of its own")]
pub(crate) struct Settings {
    pub(crate) report: Sink,
    pub(crate) no_color: bool,
    /// `None`: the best. See [`gauge`](Self::gauge).
    gauge: Option<Gauge>,
    /// `None`: the best. See [`source`](Self::source).
    source: Option<Source>,
    pub(crate) sample_every: Duration,
    pub(crate) cupti: Option<PathBuf>,
    pub(crate) stacks: Stacks,
    pub(crate) leaks: bool,
    pub(crate) peak: bool,
    pub(crate) capture: Option<PathBuf>,
    pub(crate) skip_budgets: bool,
    pub(crate) baseline: Option<PathBuf>,
    pub(crate) update_baseline: bool,
    /// The memory of each device. See [`sim`](Self::sim).
    sim: Vec<Bytes>,
    problems: Vec<Problem>,
    /// The variables that are set, with their values and what these stand for.
    set: Vec<(&'static str, String, String)>,
}

/// A value that cannot be used.
struct Problem {
    variable: &'static str,
    error: Error,
    instead: &'static str,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            report: Sink::default(),
            no_color: false,
            gauge: None,
            source: None,
            sample_every: Duration::from_millis(1),
            cupti: None,
            stacks: Stacks::default(),
            leaks: false,
            peak: false,
            capture: None,
            skip_budgets: false,
            baseline: None,
            update_baseline: false,
            sim: Vec::new(),
            problems: Vec::new(),
            set: Vec::new(),
        }
    }
}

/// The settings of this process, read at the first use.
pub(crate) fn settings() -> &'static Settings {
    // Threads that come first together may each read; none waits for another, which the child of a fork may lack.
    static SETTINGS: OnceBox<Settings> = OnceBox::new();
    SETTINGS.get_or_init(|| Box::new(Settings::read(|name| env::var_os(name))))
}

/// The variables that are set.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.set()).finish()
    }
}

impl Settings {
    /// What these variables say, by name.
    pub(crate) fn read(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut settings = Self::default();
        for variable in VARIABLES {
            let Some(text) = value(variable.name).filter(|text| !text.to_string_lossy().trim().is_empty()) else {
                continue;
            };
            let stands_for = (variable.read)(&text, &mut settings).unwrap_or_else(|Refused { detail, instead }| {
                let told = format!("cannot be used: {detail}; {instead}");
                let error = Kind::BadSetting { setting: variable.name, detail }.into();
                settings.problems.push(Problem { variable: variable.name, error, instead });
                told
            });
            settings.set.push((variable.name, text.to_string_lossy().into_owned(), stands_for));
        }
        settings
    }

    /// The gauge of traces; `None` for the best.
    pub(crate) fn gauge(&self) -> Result<Option<Gauge>> {
        self.check(GAUGE).map(|()| self.gauge)
    }

    /// The source of allocations; `None` for the best.
    pub(crate) fn source(&self) -> Result<Option<Source>> {
        self.check(SOURCE).map(|()| self.source)
    }

    /// The memory of each simulated device.
    pub(crate) fn sim(&self) -> Result<&[Bytes]> {
        self.check(SIM).map(|()| &*self.sim)
    }

    fn check(&self, variable: &str) -> Result<()> {
        match self.problems.iter().find(|problem| problem.variable == variable) {
            Some(problem) => Err(problem.error.clone()),
            None => Ok(()),
        }
    }

    /// This error is a value that cannot be used, which [`problems`](Self::problems) names.
    pub(crate) fn is_problem(&self, error: &Error) -> bool {
        self.problems.iter().any(|problem| problem.error == *error)
    }

    /// The values that cannot be used, a line for each.
    pub(crate) fn problems(&self) -> Option<Problems<'_>> {
        (!self.problems.is_empty()).then_some(Problems(&self.problems))
    }

    /// Each variable that is set, with its value, what it stands for, and what the variable decides.
    pub(crate) fn set(&self) -> impl Iterator<Item = String> {
        self.set.iter().map(|(name, text, stands_for)| {
            let meaning = VARIABLES.iter().find(|variable| variable.name == *name).map_or("", |row| row.meaning);
            format!("{name}={text} ({meaning}): {stands_for}")
        })
    }
}

/// Values that cannot be used.
pub(crate) struct Problems<'a>(&'a [Problem]);

impl fmt::Display for Problems<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Problem { error, instead, .. }) in self.0.iter().enumerate() {
            let before = if at == 0 { "" } else { "\ngpumem: " };
            write!(f, "{before}{error}; {instead}")?;
        }
        Ok(())
    }
}

fn refuse<T>(detail: String, instead: &'static str) -> Result<T, Refused> {
    Err(Refused { detail, instead })
}

fn not_one_of(text: &OsStr, names: &str) -> String {
    format!("`{}` is not one of {names}", text.display())
}

fn lower(text: &OsStr) -> String {
    text.to_string_lossy().trim().to_ascii_lowercase()
}

/// `None` for `auto`.
fn unless_auto<T: FromStr<Err: Display>>(text: &OsStr, instead: &'static str) -> Result<Option<T>, Refused> {
    match text.to_string_lossy().trim() {
        text if text.eq_ignore_ascii_case("auto") => Ok(None),
        text => text.parse().map(Some).or_else(|error| refuse(format!("{error}, or auto for the best"), instead)),
    }
}

fn path(text: &OsStr, to: &mut Option<PathBuf>) -> String {
    *to = Some(text.into());
    text.to_string_lossy().into_owned()
}

fn flag(text: &OsStr, to: &mut bool) -> Result<String, Refused> {
    *to = match &*lower(text) {
        "1" | "on" | "true" | "yes" => true,
        "0" | "off" | "false" | "no" => false,
        _ => {
            *to = true;
            return refuse(not_one_of(text, "1 or 0"), "it counts as 1");
        }
    };
    Ok(if *to { "yes" } else { "no" }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Settings {
        let value = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| text.into());
        Settings::read(value)
    }

    fn problems(variables: &[(&str, &str)]) -> String {
        of(variables).problems().map(|problems| problems.to_string()).unwrap_or_default()
    }

    #[test]
    fn the_book_has_exactly_this_table() {
        let rows = VARIABLES.iter().map(|Variable { name, meaning, values, default, .. }| {
            format!("| `{name}` | {meaning} | {values} | {default} |\n")
        });
        let heading = "| variable | what it decides | values | default |\n|---|---|---|---|\n";
        let table = heading.to_owned() + &rows.collect::<String>();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/book/src/environment.md");
        let page = std::fs::read_to_string(path).expect("the tests run in a checkout");
        let rows = page.lines().filter(|line| line.starts_with("| `GPUMEM_") || line.starts_with("| `NO_")).count();
        assert!(
            page.contains(&format!("\n\n{table}\n")) && rows == VARIABLES.len(),
            "{path} needs this table of the environment variables, and no other:\n\n{table}"
        );
    }

    #[test]
    fn nothing_set_is_the_default() {
        let settings = of(&[]);
        assert!(matches!(settings.report, Sink::Stdout) && !settings.no_color);
        assert_eq!((settings.gauge(), settings.source()), (Ok(None), Ok(None)));
        assert_eq!(settings.sample_every, Duration::from_millis(1));
        assert_eq!((settings.stacks, settings.sim()), (Stacks::Large, Ok(&[][..])));
        assert_eq!((settings.cupti, settings.baseline), (None, None));
        let flags = [settings.leaks, settings.peak, settings.skip_budgets, settings.update_baseline];
        assert_eq!(flags, [false; 4]);
        let empty: Vec<_> = VARIABLES.iter().map(|variable| (variable.name, " ")).collect();
        let empty = of(&empty);
        assert!(empty.problems().is_none() && empty.set().next().is_none());
    }

    /// `status()` lists each with what it stands for.
    #[test]
    fn each_value_is_read_and_told() {
        let check = |name: &str, text: &str, stands_for: &str| {
            let settings = of(&[(name, text)]);
            let meaning = VARIABLES.iter().find(|variable| variable.name == name).expect("it is in the list").meaning;
            assert_eq!(settings.set().collect::<Vec<_>>(), [format!("{name}={text} ({meaning}): {stands_for}")]);
            assert_eq!(problems(&[(name, text)]), "");
            settings
        };
        for text in ["stdout", " STDERR ", "off", "file:/tmp/A.txt"] {
            let stands_for = if text.contains(':') { text.to_owned() } else { text.trim().to_lowercase() };
            assert_eq!(check("GPUMEM_REPORT", text, &stands_for).report.to_string(), stands_for);
        }
        #[cfg(feature = "json")]
        for text in ["json", "json:a b.jsonl"] {
            assert_eq!(check("GPUMEM_REPORT", text, text).report.to_string(), text);
        }
        assert!(check("NO_COLOR", "1", "1").no_color);
        for (text, gauge) in [("AUTO", None), ("Sampled ", Some(Gauge::Sampled)), ("pool", Some(Gauge::Pool))] {
            let stands_for = gauge.map_or("auto", Gauge::name);
            assert_eq!(check("GPUMEM_GAUGE", text, stands_for).gauge(), Ok(gauge));
        }
        for (text, source) in [("auto", None), ("Dispatch", Some(Source::Dispatch)), ("cupti", Some(Source::Cupti))] {
            let stands_for = source.map_or("auto", Source::name);
            assert_eq!(check("GPUMEM_SOURCE", text, stands_for).source(), Ok(source));
        }
        assert_eq!(check("GPUMEM_SAMPLE_MS", " 7", "7").sample_every, Duration::from_millis(7));
        assert_eq!(check("GPUMEM_CUPTI", "/opt/c", "/opt/c").cupti.as_deref(), Some("/opt/c".as_ref()));
        for (text, stacks, stands_for) in [
            ("1", Stacks::All, "all"),
            ("Full", Stacks::All, "all"),
            ("0", Stacks::None, "none"),
            ("auto", Stacks::Large, "auto"),
        ] {
            assert_eq!(check("GPUMEM_BACKTRACE", text, stands_for).stacks, stacks);
        }
        for (text, is_on, stands_for) in [("1", true, "yes"), ("0", false, "no"), ("off", false, "no")] {
            assert_eq!(check("GPUMEM_LEAKS", text, stands_for).leaks, is_on);
            assert_eq!(check("GPUMEM_PEAK", text, stands_for).peak, is_on);
            assert_eq!(check("GPUMEM_BASELINE_UPDATE", text, stands_for).update_baseline, is_on);
        }
        assert!(check("GPUMEM_BUDGETS", "skip", "skip").skip_budgets);
        #[cfg(feature = "capture")]
        assert_eq!(check("GPUMEM_CAPTURE", "a-%p", "a-%p").capture.as_deref(), Some("a-%p".as_ref()));
        assert_eq!(check("GPUMEM_BASELINE", "a b", "a b").baseline.as_deref(), Some("a b".as_ref()));
        #[cfg(feature = "sim")]
        assert_eq!(check("GPUMEM_SIM", "16GiB, 8GiB", "16 GiB, 8 GiB").sim(), Ok(&[Bytes::gib(16), Bytes::gib(8)][..]));
    }

    #[test]
    fn what_cannot_be_used_is_one_text() {
        let bad: Vec<_> = VARIABLES.iter().map(|variable| (variable.name, "?")).collect();
        let settings = of(&bad);
        let text = settings.problems().expect("there are some").to_string();
        // A path can have any name, and `NO_COLOR` any value.
        let mut paths = vec!["GPUMEM_CUPTI", "GPUMEM_BASELINE", "NO_COLOR"];
        if cfg!(feature = "capture") {
            paths.push("GPUMEM_CAPTURE");
        }
        let named: Vec<_> =
            VARIABLES.iter().map(|variable| variable.name).filter(|name| !paths.contains(name)).collect();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), named.len(), "{text}");
        for (at, (line, name)) in lines.iter().zip(named).enumerate() {
            let before = if at == 0 { "" } else { "gpumem: " };
            assert!(line.starts_with(&format!("{before}cannot use {name}: ")), "{line}");
            let told: Vec<_> = settings.set().filter(|told| told.starts_with(&format!("{name}=?"))).collect();
            assert!(told.len() == 1 && told[0].contains("): cannot be used: "), "{told:?}");
        }
        // The default stays, or the error.
        assert!(settings.gauge().is_err() && settings.source().is_err() && settings.sim().is_err());
        assert_eq!(settings.sample_every, Duration::from_millis(1));
        let error = settings.gauge().unwrap_err();
        assert!(settings.is_problem(&error) && !of(&[]).is_problem(&error) && error.is_invalid_setting());
    }

    #[test]
    fn it_says_what_is_wrong_and_what_happens_instead() {
        for (name, value, text) in [
            (
                "GPUMEM_SOURCE",
                "nsys",
                "`nsys` is not a source of allocations; write dispatch or cupti, or auto for the best; traces are sampled, \
                 and shorter peaks are missed, unless the program chooses the source",
            ),
            (
                "GPUMEM_SAMPLE_MS",
                "0",
                "`0` is not a whole number of milliseconds from 1 to 4294967295; readings are 1 ms apart",
            ),
            ("GPUMEM_LEAKS", "maybe", "`maybe` is not one of 1 or 0; it counts as 1"),
            ("GPUMEM_BUDGETS", "no", "`no` is not `skip`; budgets are held"),
            #[cfg(feature = "sim")]
            (
                "GPUMEM_SIM",
                "16",
                "16 B is less than a page of a GPU (2 MiB); write a unit, such as 16GiB; traces are off",
            ),
            #[cfg(not(feature = "sim"))]
            (
                "GPUMEM_SIM",
                "16GiB",
                "this build has no simulated devices; enable the feature `sim`; the real devices are used",
            ),
        ] {
            assert_eq!(problems(&[(name, value)]), format!("cannot use {name}: {text}"));
        }
        assert!(of(&[("GPUMEM_LEAKS", "maybe")]).leaks);
    }
}
