//! The tree of scopes and functions whose calls allocated the blocks live at the peak, for `--calls`.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Write},
    num::NonZeroUsize,
};

use clap::Args;
use gpumem_core::{
    export::{InPaint, Leaf, Paint, Role, Tree, part_table},
    model::{ByteDelta, Bytes, one_line},
};
use serde::{Serialize, Serializer};

use super::{
    change::Limit,
    text::{device_in_words, unit_of},
};
use crate::{
    failure::Failure,
    formats::{
        Indices,
        frames::{held_at, stack},
    },
    history::{History, Moment},
};

/// The options of `--calls`, which choose a part of the tree.
#[derive(Debug, Args)]
#[group(id = "call_options", multiple = true, conflicts_with_all = ["tree", "table", "leaks", "between", "at", "html", "format"])]
pub(crate) struct CallOptions {
    /// With --calls: start at the functions, Python packages, libraries and scopes that have this in their names.
    #[arg(long, value_name = "NAME", requires = "calls")]
    inside: Option<String>,
    /// With --calls: at most this many rows inside each other.
    #[arg(long, value_name = "ROWS", requires = "calls", conflicts_with = "json")]
    depth: Option<NonZeroUsize>,
    /// With --calls: combine all rows with less than this into one, such as 1% of the total, or 100MiB. Without this option,
    /// 40 rows.
    #[arg(long, value_name = "LIMIT", requires = "calls", conflicts_with = "json")]
    min: Option<Limit>,
}

impl CallOptions {
    /// Returns the JSON of the report.
    pub(crate) fn of(&self, history: &History) -> AllCalls {
        calls(history, self.inside.as_deref())
    }

    /// Checks that the requested scope or function contains something.
    pub(crate) fn check(&self, history: &History) -> Result<(), Failure> {
        let Some(inside) = &self.inside else { return Ok(()) };
        let AllCalls { all, names } = calls(history, None);
        if all.is_empty() || !self.of(history).all.is_empty() {
            return Ok(());
        }
        let what = format!("`{}` cannot be shown inside `{inside}`", history.path.display());
        let cause = "no call that led to the peak contains this in its name";
        let known = all[0].frames.last().map(|innermost| names[*innermost].split(" (").next().unwrap_or_default());
        let next = format!("pass a part of a name that --calls shows, such as `{}`", known.unwrap_or_default());
        Err(Failure::new(what, cause, next))
    }
}

/// The blocks of each stack that were live at the peak of its device, the most bytes first. `Serialize` writes them as
/// a list.
#[derive(Debug, Default)]
pub(crate) struct AllCalls {
    all: Vec<Calls>,
    /// Scopes, and functions with their lines.
    names: Vec<String>,
}

#[derive(Debug)]
struct Calls {
    device: u32,
    bytes: i64,
    blocks: i64,
    /// The indexes in `names` of its scopes and then of its functions, the outermost first.
    frames: Vec<usize>,
    /// The number of scopes among `frames`.
    scopes: usize,
    /// The index of the device in the history.
    number: u16,
}

impl Serialize for AllCalls {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct CallRow<'a> {
            device: u32,
            bytes: i64,
            blocks: i64,
            frames: Vec<&'a str>,
        }
        to.collect_seq(self.all.iter().map(|Calls { device, bytes, blocks, frames, .. }| {
            let frames = frames.iter().map(|frame| self.names[*frame].as_str()).collect();
            CallRow { device: *device, bytes: *bytes, blocks: *blocks, frames }
        }))
    }
}

fn calls(history: &History, inside: Option<&str>) -> AllCalls {
    let folder = &history.definitions().process().folder;
    let mut all: Vec<Calls> = Vec::new();
    let mut names = Indices::<String>::default();
    let mut stacks = Indices::<(u16, Vec<usize>)>::default();
    for held in held_at(history, Moment::Peak).iter().filter(|held| held.origin.kind.is_on_device()) {
        let stack = stack(history, held.origin, true);
        let Some(start) = stack.iter().position(|frame| inside.is_none_or(|inside| frame.name_contains(inside))) else {
            continue;
        };
        let frames: Vec<_> = stack[start..].iter().map(|frame| names.get_or_insert(&frame.in_words(folder))).collect();
        let at = stacks.get_or_insert(&(held.device, frames));
        if at == all.len() {
            let device = history.devices[usize::from(held.device)].device.ordinal;
            all.push(Calls {
                device,
                bytes: 0,
                blocks: 0,
                frames: Vec::new(),
                scopes: held.origin.path.len().saturating_sub(start),
                number: held.device,
            });
        }
        all[at].bytes += held.bytes;
        all[at].blocks += held.blocks;
    }
    for (calls, (_, frames)) in all.iter_mut().zip(stacks.all) {
        calls.frames = frames;
    }
    all.sort_by_key(|calls| std::cmp::Reverse(calls.bytes));
    AllCalls { all, names: names.all }
}

/// Without `--min`, at most this many rows are printed; JSON contains all.
const MOST: usize = 40;

pub(crate) fn write(history: &History, options: &CallOptions, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let inside = options.inside.as_deref();
    let AllCalls { all, names } = options.of(history);
    for (number, device) in (0_u16..).zip(&history.devices).filter(|(_, device)| device.peak_at.is_some()) {
        let of_device: Vec<_> = all.iter().filter(|calls| calls.number == number).collect();
        let name = history.definitions().device(device.device).and_then(|defined| defined.name.as_deref());
        let total: i64 = of_device.iter().map(|calls| calls.bytes).sum();
        let device_in_words = device_in_words(device.device, name);
        let title = match inside {
            None => format!("{device_in_words}: the peak was {}", ByteDelta::new(total)),
            Some(inside) => {
                let (total, peak) = (ByteDelta::new(total), Bytes::new(device.peak));
                format!("{device_in_words}: {total} of the peak of {peak} are inside `{}`", one_line(inside))
            }
        };
        writeln!(out, "{}{}", if number > 0 { "\n" } else { "" }, paint.on(Role::Heading, title))?;
        let (most, least) = options.min.map_or((MOST, 0), |min| (usize::MAX, min.of(total.unsigned_abs())));
        let rows = tree(&of_device, &names).pruned(most, options.depth.map_or(usize::MAX, NonZeroUsize::get), least);
        if !rows.is_empty() {
            writeln!(out, "{}", InPaint(&part_table("allocated by", &rows, unit_of(total.unsigned_abs())), paint))?;
        }
    }
    if all.is_empty() {
        writeln!(out, "nothing was allocated")?;
    }
    Ok(())
}

/// Builds the tree. A function that called only one other function gets no row, because its bytes are the same. If
/// there are functions between a row and an innermost function inside of it, the outermost of them becomes a note.
fn tree(calls: &[&Calls], names: &[String]) -> Tree {
    /// The path that contains no function.
    const OUTSIDE: usize = usize::MAX;

    // The functions called from each path of functions. Stacks share the start of their paths, so a path is stored as
    // the index of its parent and a function.
    let mut paths = Indices::<(usize, usize)>::default();
    let mut called: HashMap<usize, HashSet<usize>> = HashMap::new();
    let numbered: Vec<Vec<usize>> = calls
        .iter()
        .map(|calls| {
            let mut path = OUTSIDE;
            let of_path = calls.frames.iter().map(|function| {
                called.entry(path).or_default().insert(*function);
                path = paths.get_or_insert(&(path, *function));
                path
            });
            of_path.collect()
        })
        .collect();
    let branches = |path: usize| called.get(&path).is_some_and(|functions| functions.len() > 1);
    let mut tree = Tree::new();
    for (Calls { frames, bytes, blocks, scopes, .. }, paths) in calls.iter().zip(numbered) {
        let Some((innermost, outer)) = frames.split_last() else { continue };
        let name = |function: &usize| names[*function].clone();
        let branching = outer.iter().zip(&paths).filter(|(_, path)| branches(**path));
        let path: Vec<_> = branching.map(|(function, _)| name(function)).collect();
        let chain = outer.iter().zip(&paths).rposition(|(_, path)| branches(*path)).map_or(0, |at| at + 1);
        // A scope is less specific than the function in it.
        let note = outer.get(chain).map(|_| name(&outer[(*scopes).clamp(chain, outer.len() - 1)]));
        tree.leaf(&path, Leaf { name: name(innermost), bytes: *bytes, blocks: blocks.unsigned_abs(), note });
    }
    tree
}
