//! Shows the memory of GPUs, processes and running recordings, updated repeatedly.

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    thread,
    time::Duration,
};

use clap::Args;

use crate::{
    exit::Exit,
    failure::Failure,
    files, machine,
    report::json,
    terminal,
    watch::{self, Sample, Sampler},
};

const EXAMPLES: &str = "\
Examples:
  gpumem watch
  gpumem watch --interval 200ms
  gpumem watch train.pid4711.capture       this recording, too
  gpumem watch --json --count 1 | jq '.recordings[].devices[].peak_bytes'";

/// Shows the memory of each GPU over time, processes, and peaks and places of running recordings. Press ? for the keys.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WatchArguments {
    /// Recordings, folders or patterns to show in addition to those of this user's processes, which are found automatically.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The time between two readings, such as 2s or 200ms.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Exit after this number of readings.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print each reading as a JSON object on its own line. This needs no terminal.
    #[arg(long)]
    json: bool,
}

/// Parses a duration such as `2`, `2s` or `200ms`.
fn interval(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.trim().parse::<f64>().ok().map(|number| number * unit);
    match seconds {
        Some(seconds) if (0.05..=3_600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it is not a time from 50ms to 3600s".to_owned()),
    }
}

pub(super) fn execute(arguments: &WatchArguments) -> Result<Exit, Failure> {
    let WatchArguments { files, interval, count, json } = arguments;
    let mut sampler = Sampler::new(files::expand(files)?);
    if *json {
        return print(&mut sampler, *interval, *count);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let next = "use --json, or `gpumem ps` for one look";
        return Err(Failure::new("`gpumem watch` cannot draw", "stdin or stdout is not a terminal", next));
    }
    // If there is nothing to show, the command reports why.
    let first = sampler.sample();
    check(&first)?;
    watch::show(sampler, *interval, *count, terminal::has_colours()).map_err(|error| Failure::of_output(&error))?;
    Ok(Exit::Done)
}

/// Returns an error if there is neither a GPU nor a recording.
fn check(sample: &Sample) -> Result<(), Failure> {
    if !sample.machine.gpus.is_empty() || !sample.recordings.is_empty() {
        return Ok(());
    }
    match sample.machine.not_read.first() {
        Some(not_read) => Err(Failure::new("GPUs cannot be read", &not_read.why, "")),
        None => Err(machine::no_gpu()),
    }
}

fn print(sampler: &mut Sampler, interval: Duration, count: Option<u64>) -> Result<Exit, Failure> {
    let mut printed = 0;
    loop {
        let sample = sampler.sample();
        check(&sample)?;
        terminal::print(|out| json::write_line(&sample, out))?;
        printed += 1;
        if Some(printed) == count {
            let mut not_read = sample.machine.not_read;
            not_read.extend(sample.usage.not_read);
            return Ok(machine::exit_of(&not_read));
        }
        thread::sleep(interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals() {
        for (text, millis) in [("1s", 1_000), ("0.5", 500), ("200ms", 200), ("3600s", 3_600_000)] {
            assert_eq!(interval(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "0", "-1s", "49ms", "1h", "nan", "inf"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }
}
