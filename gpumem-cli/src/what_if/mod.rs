//! `gpumem what-if`: dry runs of one program with different settings, and what each would need.

mod trial;

use std::{
    ffi::OsString,
    fmt,
    io::{self, Write},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::Bytes,
};
use gpumem_driver::settings::CONTEXT;
use serde::Serialize;

use self::trial::{Outcome, Trials};
use crate::failure::Failure;

/// The variable of PyTorch's allocator.
const ALLOCATOR: &str = "PYTORCH_CUDA_ALLOC_CONF";
/// What is tried unless the user says what: each changes how PyTorch's allocator splits or keeps memory.
const SETTINGS: [&str; 6] = [
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "backend:cudaMallocAsync",
];
/// The search for the smallest card ends when the error is at most this part of the card.
const PRECISION: u64 = 50;

/// What is asked.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) command: Vec<OsString>,
    /// Environments, such as `BATCH=16 LENGTH=512`. Empty: PyTorch's settings.
    pub(crate) tries: Vec<String>,
    /// The card on which all is tried.
    pub(crate) card: Bytes,
    /// How many dry runs there are at a time.
    pub(crate) jobs: usize,
}

/// What the program needs with one environment. The names of the fields are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The variables that were set. Empty: as the program is.
    pub(crate) environment: String,
    /// The most that the driver gave to a process. `None` if the program failed.
    pub(crate) most_bytes: Option<u64>,
    /// How many requests were refused for good: what an allocator obtained after it had emptied its cache does not count.
    pub(crate) refused: u64,
    /// The smallest card with which the program ends well and gets what it asks for, up to 2 % too large. `None` if it failed.
    pub(crate) smallest_card_bytes: Option<u64>,
    /// Why there are no figures.
    pub(crate) failed: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Answer {
    pub(crate) rows: Vec<Row>,
    /// The environment that needs the smallest card, if it is not the program's own.
    pub(crate) best: Option<String>,
    /// The environment with which PyTorch's cache takes least from the driver, if it is not the program's own. Other programs then have more.
    pub(crate) least: Option<String>,
    /// How many dry runs it took.
    pub(crate) dry_runs: usize,
}

/// Runs the program dry with each environment.
pub(crate) fn ask(question: &Question) -> Result<Answer, Failure> {
    let trials = Trials::new(&question.command)?;
    let mut environments = vec![String::new()];
    if question.tries.is_empty() {
        environments.extend(SETTINGS.iter().map(|setting| format!("{ALLOCATOR}={setting}")));
    } else {
        environments.extend(question.tries.iter().cloned());
    }
    // If the program does not run as it is, nothing else says anything.
    let own = trials.run("", question.card)?;
    if let (Outcome { failed: Some(why), refused: 0, .. }, true) = (&own, question.tries.is_empty()) {
        return Err(Failure::new(
            "the program cannot be tried",
            why,
            "run it with `gpumem run --dry` to see its output",
        ));
    }
    let rows = in_parallel(question.jobs, &environments, |environment| {
        let outcome = if environment.is_empty() { own.clone() } else { trials.run(environment, question.card)? };
        trials.row(environment, outcome)
    })?;
    let rank = |row: &&Row| (row.smallest_card_bytes.unwrap_or(u64::MAX), row.most_bytes.unwrap_or(u64::MAX));
    let best = rows.iter().min_by_key(rank).filter(|best| {
        // A difference that is smaller than the error of the search is none.
        let [own, best] = [&rows[0], *best].map(|row| row.smallest_card_bytes.unwrap_or(u64::MAX));
        own > best && own - best > best / (PRECISION / 2)
    });
    // The pool of `cudaMallocAsync` is the driver's, which gives more than is counted.
    let own = rows[0].most_bytes.unwrap_or(u64::MAX);
    let known = rows.iter().filter(|row| !row.environment.contains("cudaMallocAsync") && row.most_bytes < Some(own));
    let least = known.filter(|row| row.most_bytes.is_some()).min_by_key(|row| row.most_bytes);
    let [best, least] = [best, least].map(|row| row.map(|row| row.environment.clone()));
    Ok(Answer { best, least, dry_runs: trials.count(), rows })
}

/// The largest value of a variable with which the program ends well. `None` if there is none.
pub(crate) fn largest(question: &Question, name: &str) -> Result<Option<u64>, Failure> {
    let trials = Trials::new(&question.command)?;
    let fits = |value: u64| {
        let outcome = trials.run(&format!("{name}={value}"), question.card)?;
        match outcome {
            Outcome { failed: None, .. } => Ok(true),
            Outcome { refused, .. } if refused > 0 => Ok(false),
            Outcome { failed, .. } => {
                let what = format!("the program cannot be tried with {name}={value}");
                Err(Failure::new(
                    what,
                    failed.unwrap_or_default(),
                    "the program must read this variable, as a whole number",
                ))
            }
        }
    };
    let (mut fitting, mut failing) = (0, 1);
    while fits(failing)? {
        (fitting, failing) = (failing, failing * 2);
        if failing > 1 << 30 {
            let what = format!("{name}={fitting} fits");
            return Err(Failure::new(what, "so does any smaller value", "the program may not read this variable"));
        }
    }
    while failing - fitting > 1 {
        let middle = fitting.midpoint(failing);
        if fits(middle)? {
            fitting = middle;
        } else {
            failing = middle;
        }
    }
    Ok((fitting > 0).then_some(fitting))
}

impl Trials {
    /// What the program needs, and the smallest card with which it ends well.
    fn row(&self, environment: &str, outcome: Outcome) -> Result<Row, Failure> {
        let Outcome { most, enough, refused, failed } = outcome;
        let mut row = Row {
            environment: environment.to_owned(),
            most_bytes: failed.is_none().then_some(most),
            refused,
            smallest_card_bytes: None,
            failed,
        };
        if row.failed.is_some() {
            return Ok(row);
        }
        let (mut too_small, mut enough) = (CONTEXT.get(), enough);
        while enough - too_small > enough / PRECISION {
            let middle = too_small.midpoint(enough);
            if self.run(environment, Bytes::new(middle))?.failed.is_none() {
                enough = middle;
            } else {
                too_small = middle;
            }
        }
        row.smallest_card_bytes = Some(enough);
        Ok(row)
    }
}

/// The results, in the order of the items. The first failure ends it.
fn in_parallel<I: Sync, T: Send>(
    jobs: usize,
    items: &[I],
    work: impl Fn(&I) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    let Some(item) = items.get(at) else { return };
                    let result = work(item);
                    if result.is_err() {
                        next.store(items.len(), Relaxed);
                    }
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

impl Answer {
    /// Whether the program runs with one of the environments.
    pub(crate) fn has_any(&self) -> bool {
        self.rows.iter().any(|row| row.smallest_card_bytes.is_some())
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        writeln!(out, "{}", InPaint(&Rows(&self.rows), paint))?;
        let card = |row: &Row| {
            row.smallest_card_bytes.map_or_else(|| "no card".to_owned(), |card| Bytes::new(card).to_string())
        };
        let row = |environment: &Option<String>| {
            environment.as_ref().and_then(|environment| self.rows.iter().find(|row| row.environment == *environment))
        };
        let sentence = match row(&self.best) {
            _ if !self.has_any() => "The program does not run with any of these. A larger --card may help.".to_owned(),
            Some(best) => {
                format!("Best: {}, for a card of {} instead of {}.", best.environment, card(best), card(&self.rows[0]))
            }
            None => "None of these needs a smaller card than the program as it is.".to_owned(),
        };
        writeln!(out, "{}", paint.on(Role::Heading, sentence))?;
        let most = |row: &Row| Bytes::new(row.most_bytes.unwrap_or(0));
        if let Some(least) = row(&self.least).filter(|_| self.least != self.best) {
            writeln!(
                out,
                "Least from the driver: {}, {} instead of {}.",
                least.environment,
                most(least),
                most(&self.rows[0])
            )?;
        }
        let note = format!("{} dry runs. A card is all of its memory, with {CONTEXT} for the context.", self.dry_runs);
        writeln!(out, "{}", paint.on(Role::Faint, note))
    }
}

struct Rows<'a>(&'a [Row]);

impl Show for Rows<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let amount = |bytes: Option<u64>| bytes.and_then(|bytes| i64::try_from(bytes).ok());
        let figures = |row: &Row| [amount(row.most_bytes), amount(row.smallest_card_bytes)];
        let amounts = Amounts::of(self.0.iter().flat_map(figures).flatten());
        let mut table = Table::new()
            .column("with", Fit::LeftCutFront)
            .amounts("from the driver", amounts)
            .amounts("smallest card", amounts)
            .column("", Fit::Left);
        for row in self.0 {
            let [most, card] =
                figures(row).map(|bytes| bytes.map_or_else(|| "?".to_owned(), |bytes| amounts.show(bytes)));
            let name = if row.environment.is_empty() { "the program as it is" } else { &row.environment };
            let note = match (&row.failed, row.refused) {
                (Some(_), 0) => "failed",
                (Some(_), _) => "out of memory",
                (None, _) => "",
            };
            table.row([Cell::from(name), most.into(), card.into(), note.into()]);
        }
        table.show(f, paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<u64> = (0..50).collect();
        assert_eq!(
            in_parallel(4, &items, |item| Ok(item * 2)).unwrap(),
            items.iter().map(|item| item * 2).collect::<Vec<_>>()
        );
        let failing = |item: &u64| if *item == 7 { Err(Failure::new("7", "", "")) } else { Ok(*item) };
        assert!(in_parallel(4, &items, failing).is_err());
    }
}
