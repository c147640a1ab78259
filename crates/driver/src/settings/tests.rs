//! Tests the list of variables and the meanings of their values.

use std::time::Duration;

use super::{
    Settings, Stacks,
    variables::{VARIABLES, Variable},
};
use crate::{
    export::Sink,
    model::{Gauge, Source},
};

fn of(variables: &[(&str, &str)]) -> Settings {
    let value = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| text.into());
    Settings::read(value)
}

fn problems(variables: &[(&str, &str)]) -> String {
    of(variables).problems().collect::<Vec<_>>().join("\n")
}

#[test]
fn the_book_has_exactly_this_table() {
    let rows = VARIABLES.iter().map(|Variable { name, meaning, values, default, .. }| {
        format!("| `{name}` | {meaning} | {values} | {default} |\n")
    });
    let heading = "| variable | what it decides | values | default |\n|---|---|---|---|\n";
    let table = heading.to_owned() + &rows.collect::<String>();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/environment.md");
    let page = std::fs::read_to_string(path).expect("it links to the page");
    let rows = page.lines().filter(|line| line.starts_with("| `GPUMEM") || line.starts_with("| `NO_")).count();
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
    assert!(empty.problems().next().is_none() && empty.set().next().is_none());
}

/// `status()` lists each variable with its meaning.
#[test]
fn each_value_is_read_and_listed() {
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
    for text in ["json", "json:a b.jsonl"] {
        assert_eq!(check("GPUMEM_REPORT", text, text).report.to_string(), text);
    }
    assert!(check("NO_COLOR", "1", "1").no_color);
    for (text, gauge) in [("AUTO", None), ("Sampled ", Some(Gauge::Sampled))] {
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
    assert_eq!(check("GPUMEM_CAPTURE", "a-%p", "a-%p").recording.as_deref(), Some("a-%p".as_ref()));
    assert_eq!(check("GPUMEM_BASELINE", "a b", "a b").baseline.as_deref(), Some("a b".as_ref()));
    #[cfg(feature = "sim")]
    assert_eq!(
        check("GPUMEM_SIM", "16GiB, 8GiB", "16 GiB, 8 GiB").sim(),
        Ok(&[16, 8].map(crate::model::Bytes::gib)[..])
    );
}

#[test]
fn each_invalid_value_has_a_sentence() {
    let bad: Vec<_> = VARIABLES.iter().map(|variable| (variable.name, "?")).collect();
    let settings = of(&bad);
    let lines: Vec<_> = settings.problems().collect();
    // Paths and threads can have any name, and `NO_COLOR` can have any value.
    let mut paths = vec!["GPUMEM_ADOPT", "GPUMEM_CUPTI", "GPUMEM_BASELINE", "NO_COLOR"];
    if cfg!(feature = "capture") {
        paths.push("GPUMEM_CAPTURE");
    }
    let named: Vec<_> = VARIABLES.iter().map(|variable| variable.name).filter(|name| !paths.contains(name)).collect();
    assert_eq!(lines.len(), named.len(), "{lines:?}");
    for (line, name) in lines.iter().zip(named) {
        assert!(line.starts_with(&format!("cannot use {name}: ")), "{line}");
        let set: Vec<_> = settings.set().filter(|line| line.starts_with(&format!("{name}=?"))).collect();
        assert!(set.len() == 1 && set[0].contains("): cannot be used: "), "{set:?}");
    }
    // The default is used, or the error is returned.
    assert!(settings.gauge().is_err() && settings.source().is_err() && settings.sim().is_err());
    assert_eq!(settings.sample_every, Duration::from_millis(1));
    let error = settings.gauge().unwrap_err();
    assert!(settings.is_problem(&error) && !of(&[]).is_problem(&error) && error.is_invalid_setting());
}

/// A program may set a variable to any value.
#[test]
fn a_long_value_is_quoted_in_part() {
    const LONG: usize = 1 << 17;
    let long = |part: &str| part.repeat(LONG / part.len());
    for value in
        [long("x"), long("x=1,"), long("f>=x,"), long("7"), long("é, "), format!("file:/{}", long("a/")), long("off,")]
    {
        for Variable { name, .. } in VARIABLES {
            let settings = of(&[(*name, &*value)]);
            let said = [settings.problems().collect::<String>(), settings.set().collect()];
            assert!(said.iter().all(|text| text.chars().count() < 2500), "{name}: {} {}", said[0].len(), said[1].len());
        }
    }
    let all = problems(&[("GPUMEM", "a=1,b=2,c=3,d=4,e=5,f=6")]);
    assert!(all.contains("; `4` at character 15: ") && !all.contains("`5`"), "{all}");
    assert!(all.ends_with("; and 2 more; wrong directives are left out"), "{all}");
}

#[test]
fn a_problem_has_its_reason_and_what_happens_instead() {
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
        ("GPUMEM_BUDGETS", "no", "`no` is not `skip`; budgets are enforced"),
        #[cfg(feature = "sim")]
        ("GPUMEM_SIM", "16", "16 B is less than a page of a GPU (2 MiB); write a unit, such as 16GiB; traces are off"),
        #[cfg(not(feature = "sim"))]
        (
            "GPUMEM_SIM",
            "16GiB",
            "this build has no simulated devices; add gpumem's feature `sim` in the program's Cargo.toml; the real devices are used",
        ),
    ] {
        assert_eq!(problems(&[(name, value)]), format!("cannot use {name}: {text}"));
    }
    assert!(of(&[("GPUMEM_LEAKS", "maybe")]).leaks);
}

/// A path need not be UTF-8.
#[cfg(all(unix, feature = "capture"))]
#[test]
fn the_number_of_the_process_is_put_into_any_path() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    let pid = std::process::id().to_string();
    for (path, parts) in [
        (&b"%p"[..], &[&b""[..], b""][..]),
        (b"a/\xff/%p-%p.x", &[b"a/\xff/", b"-", b".x"]),
        (b"\xffp%%p%", &[b"\xffp%", b"%"]),
        (b"no number\xff%", &[b"no number\xff%"]),
    ] {
        let settings = Settings::read(|name| (name == "GPUMEM_CAPTURE").then(|| OsStr::from_bytes(path).to_owned()));
        let recording = settings.recording().unwrap();
        assert_eq!(recording.as_os_str().as_bytes(), parts.join(pid.as_bytes()), "{}", path.escape_ascii());
    }
}
