//! The modules of a network and what tensors are for, at one moment.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{self, Write},
};

use gpumem_core::{
    export::{InPaint, Leaf, Paint, Tree},
    recording::TensorClass,
};
use serde::Serialize;

use super::text::Bars;
use crate::history::tensors::{AllocatorState, Tensors};

/// At most this many rows are printed of each table; JSON has all.
const MOST_ROWS: usize = 12;

/// Where a module has no name.
const NO_MODULE: &str = "outside of all modules";

/// The tensors of modules that are equal but for numbers in their paths.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModuleSum {
    /// Such as `GPT2LMHeadModel.transformer.h.0 … 11.mlp.act`. `None` outside of all modules.
    pub(crate) module: Option<String>,
    /// How many modules they are.
    pub(crate) modules: usize,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) by_class: Vec<ClassSum>,
}

/// The tensors of one class.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClassSum {
    /// `not classified` if it is not known.
    pub(crate) class: &'static str,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
}

#[derive(Default)]
struct Sum {
    /// The paths of the modules, each in parts.
    modules: BTreeSet<Vec<String>>,
    by_class: BTreeMap<Option<TensorClass>, (u64, u64)>,
}

/// The sums by module and by class, the largest first. `None` if the program was recorded without modules.
pub(crate) fn sums(tensors: &Tensors, state: &AllocatorState) -> Option<(Vec<ModuleSum>, Vec<ClassSum>)> {
    let classes = tensors.classes.as_ref()?;
    let mut by_module: HashMap<Vec<&str>, Sum> = HashMap::new();
    let mut by_class = BTreeMap::new();
    for tensor in state.tensors.values().filter(|tensor| !tensor.is_awaiting) {
        let origin = tensor.origin as usize;
        let path = tensors.origins.get(origin).and_then(|origin| origin.path.first()).map_or("", String::as_str);
        let sum = by_module.entry(path.split('.').map(without_number).collect()).or_default();
        sum.modules.insert(path.split('.').map(str::to_owned).collect());
        let class = classes.get(origin).copied().flatten();
        for by_class in [&mut sum.by_class, &mut by_class] {
            let (bytes, count): &mut (u64, u64) = by_class.entry(class).or_default();
            (*bytes, *count) = (bytes.saturating_add(tensor.bytes), *count + 1);
        }
    }
    let mut modules: Vec<_> = by_module.into_values().map(ModuleSum::of).collect();
    modules.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.module.cmp(&b.module)));
    Some((modules, class_sums(by_class)))
}

/// Equal layers differ in their numbers.
fn without_number(part: &str) -> &str {
    if part.parse::<u64>().is_ok() { "0" } else { part }
}

fn class_sums(sums: BTreeMap<Option<TensorClass>, (u64, u64)>) -> Vec<ClassSum> {
    let sum = |(class, (bytes, tensors)): (Option<TensorClass>, _)| {
        let class = class.map_or("not classified", TensorClass::name);
        ClassSum { class, bytes, tensors }
    };
    let mut sums: Vec<_> = sums.into_iter().map(sum).collect();
    sums.sort_by_key(|sum| Reverse(sum.bytes));
    sums
}

impl ModuleSum {
    fn of(sum: Sum) -> Self {
        let Sum { modules, by_class } = sum;
        let first = modules.first().cloned().unwrap_or_default();
        let numbers = |at: usize| modules.iter().filter_map(move |path| path[at].parse::<u64>().ok());
        let part = |(at, part): (usize, &String)| match (numbers(at).min(), numbers(at).max()) {
            (Some(least), Some(most)) if least < most => format!("{least} … {most}"),
            _ => part.clone(),
        };
        let path: Vec<_> = first.iter().enumerate().map(part).collect();
        let by_class = class_sums(by_class);
        Self {
            module: Some(path.join(".")).filter(|path| !path.is_empty()),
            modules: modules.len(),
            bytes: by_class.iter().map(|sum| sum.bytes).sum(),
            tensors: by_class.iter().map(|sum| sum.tensors).sum(),
            by_class,
        }
    }

    /// `GPT2LMHeadModel.transformer.h.0 … 11.mlp.act (12×)`
    fn name(&self) -> String {
        match &self.module {
            None => NO_MODULE.to_owned(),
            Some(module) if self.modules > 1 => format!("{module} ({}×)", self.modules),
            Some(module) => module.clone(),
        }
    }
}

pub(crate) fn write(modules: &[ModuleSum], classes: &[ClassSum], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    table("used for", classes.iter().map(|sum| (sum.class.to_owned(), sum.bytes, sum.tensors)), out, paint)?;
    table("module", modules.iter().map(|sum| (sum.name(), sum.bytes, sum.tensors)), out, paint)
}

fn table(
    title: &str,
    sums: impl Iterator<Item = (String, u64, u64)>,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let mut tree = Tree::new();
    for (name, bytes, blocks) in sums {
        tree.leaf(&[], Leaf { name, bytes: bytes.try_into().unwrap_or(i64::MAX), blocks, note: None });
    }
    writeln!(out, "{}", InPaint(&Bars(title, &tree.rows(MOST_ROWS)), paint))
}
