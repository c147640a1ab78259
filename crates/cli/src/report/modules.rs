//! The modules of a network and the classes of tensors, at one moment.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{self, Write},
};

use gpumem_core::export::{Amounts, InPaint, Leaf, Paint, Tree, part_table};
use gpumem_recording::TensorClass;
use serde::Serialize;

use crate::history::tensors::{AllocatorState, Tensors};

/// At most this many rows of each table are printed; JSON contains all.
const MOST_ROWS: usize = 6;

/// The class of tensors whose class is not known.
pub(crate) const NOT_CLASSIFIED: &str = "not classified";
/// The row of tensors that no module allocated.
const NO_MODULE: &str = "outside of all modules";

/// The tensors of modules whose paths differ only in numbers.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModuleSum {
    /// The path, such as `GPT2LMHeadModel.transformer.h.0 … 11.mlp.act`. `None` outside of all modules.
    pub(crate) module: Option<String>,
    /// Their type, such as `NewGELUActivation`. `None` for the outermost module.
    pub(crate) kind: Option<String>,
    /// The number of modules.
    pub(crate) modules: usize,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) by_class: Vec<ClassSum>,
}

/// The tensors of one class.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClassSum {
    /// `not classified` if the class is not known.
    pub(crate) class: &'static str,
    pub(crate) bytes: u64,
    /// The bytes that the program requested.
    pub(crate) requested_bytes: u64,
    pub(crate) tensors: u64,
}

#[derive(Default)]
struct Sum {
    /// The paths of the modules, split into parts.
    modules: BTreeSet<Vec<String>>,
    by_class: BTreeMap<Option<TensorClass>, (u64, u64, u64)>,
}

/// Returns the sums by module and by class, the largest first. `None` if the program was recorded without modules.
pub(crate) fn sums(tensors: &Tensors, state: &AllocatorState) -> Option<(Vec<ModuleSum>, Vec<ClassSum>)> {
    let classes = tensors.classes.as_ref()?;
    let mut by_module: HashMap<(Vec<&str>, &str), Sum> = HashMap::new();
    let mut by_class = BTreeMap::new();
    for tensor in state.tensors.values().filter(|tensor| !tensor.is_awaiting) {
        let origin = tensor.origin as usize;
        let module = tensors.origins.get(origin).and_then(|origin| origin.path.first()).map_or("", String::as_str);
        let (path, kind) = module.split_once(": ").unwrap_or((module, ""));
        let sum = by_module.entry((path.split('.').map(|part| parted(part).0).collect(), kind)).or_default();
        sum.modules.insert(path.split('.').map(str::to_owned).collect());
        let class = classes.get(origin).copied().flatten();
        for by_class in [&mut sum.by_class, &mut by_class] {
            let (bytes, requested, count): &mut (u64, u64, u64) = by_class.entry(class).or_default();
            *bytes = bytes.saturating_add(tensor.bytes);
            *requested = requested.saturating_add(tensor.requested);
            *count += 1;
        }
    }
    let mut modules: Vec<_> = by_module.into_iter().map(|((_, kind), sum)| ModuleSum::of(sum, kind)).collect();
    modules.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.module.cmp(&b.module)));
    Some((modules, class_sums(by_class)))
}

/// Splits a layer's name into the text before its number, and the number. `3` and `encoder_layer_3` have a number.
/// `conv3` has none, because it is not one of several equal layers.
fn parted(part: &str) -> (&str, Option<u64>) {
    let (text, number) = part.split_at(part.rfind('_').map_or(0, |at| at + 1));
    number.parse().map_or((part, None), |number| (text, Some(number)))
}

/// Returns `0 … 11`, or `0, 3` if some are missing.
fn range(numbers: &BTreeSet<u64>) -> String {
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { return String::new() };
    let count = numbers.len() as u64;
    if count <= 3 && last - first >= count {
        return numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    }
    if first == last { first.to_string() } else { format!("{first} … {last}") }
}

fn class_sums(sums: BTreeMap<Option<TensorClass>, (u64, u64, u64)>) -> Vec<ClassSum> {
    let sum = |(class, (bytes, requested_bytes, tensors)): (Option<TensorClass>, _)| {
        let class = class.map_or(NOT_CLASSIFIED, TensorClass::name);
        ClassSum { class, bytes, requested_bytes, tensors }
    };
    let mut sums: Vec<_> = sums.into_iter().map(sum).collect();
    sums.sort_by_key(|sum| Reverse(sum.bytes));
    sums
}

impl ModuleSum {
    fn of(sum: Sum, kind: &str) -> Self {
        let Sum { modules, by_class } = sum;
        let part = |at: usize, part: &str| {
            let numbers = modules.iter().filter_map(|path| parted(&path[at]).1).collect();
            format!("{}{}", parted(part).0, range(&numbers))
        };
        let path: Vec<_> = modules.first().into_iter().flatten().enumerate().map(|(at, text)| part(at, text)).collect();
        let by_class = class_sums(by_class);
        Self {
            module: Some(path.join(".")).filter(|path| !path.is_empty()),
            kind: Some(kind.to_owned()).filter(|kind| !kind.is_empty()),
            modules: modules.len(),
            bytes: by_class.iter().map(|sum| sum.bytes).sum(),
            tensors: by_class.iter().map(|sum| sum.tensors).sum(),
            by_class,
        }
    }

    /// Returns a name such as `transformer.h.0 … 11.mlp.act (12×)`. `top` is the outermost module of all.
    pub(super) fn name(&self, top: Option<&str>) -> String {
        let Some(module) = &self.module else { return NO_MODULE.to_owned() };
        let below = top.and_then(|top| module.strip_prefix(top)?.strip_prefix('.'));
        let mut name = below.unwrap_or(module).to_owned();
        // A number by itself does not describe the module.
        if let Some(kind) = self.kind.as_ref().filter(|_| name.ends_with(|end: char| end.is_ascii_digit())) {
            name = format!("{name} {kind}");
        }
        if self.modules > 1 { format!("{name} ({}×)", self.modules) } else { name }
    }
}

/// Returns the outermost module, if there is one.
fn top(modules: &[ModuleSum]) -> Option<&str> {
    let mut tops = modules.iter().filter_map(|sum| sum.module.as_deref()?.split('.').next());
    let first = tops.next()?;
    tops.all(|top| top == first).then_some(first)
}

pub(crate) fn write(
    modules: &[ModuleSum],
    classes: &[ClassSum],
    unit: Amounts,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let top = top(modules);
    table("used for", classes.iter().map(|sum| (sum.class.to_owned(), sum.bytes, sum.tensors)), unit, out, paint)?;
    table("module", modules.iter().map(|sum| (sum.name(top), sum.bytes, sum.tensors)), unit, out, paint)
}

/// Writes a table, or nothing if it has no rows.
pub(crate) fn table(
    title: &str,
    sums: impl Iterator<Item = (String, u64, u64)>,
    unit: Amounts,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let mut tree = Tree::new();
    for (name, bytes, blocks) in sums {
        tree.leaf(&[], Leaf { name, bytes: bytes.try_into().unwrap_or(i64::MAX), blocks, note: None });
    }
    let rows = tree.rows(MOST_ROWS);
    if rows.is_empty() { Ok(()) } else { writeln!(out, "{}", InPaint(&part_table(title, &rows, unit), paint)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_core::model::MemKind;

    use crate::history::{Origin, tensors::Tensor};

    /// Returns the names of modules, each with one tensor.
    fn names(modules: &[&str]) -> Vec<String> {
        let origin = |module: &&str| {
            let path = if module.is_empty() { Vec::new() } else { vec![(*module).to_owned()] };
            Origin { path, ..Origin::unnamed(MemKind::Device) }
        };
        let tensors = Tensors {
            origins: modules.iter().map(origin).collect(),
            classes: Some(vec![None; modules.len()]),
            ..Tensors::default()
        };
        let mut state = AllocatorState::default();
        for (number, _) in (0_u32..).zip(modules) {
            let tensor = Tensor { bytes: 512, requested: 4, origin: number, is_awaiting: false };
            state.tensors.insert(number.into(), tensor);
        }
        let (sums, classes) = sums(&tensors, &state).unwrap();
        assert_eq!((classes[0].class, classes[0].tensors), ("not classified", modules.len() as u64));
        let top = top(&sums);
        sums.iter().map(|sum| sum.name(top)).collect()
    }

    #[test]
    fn equal_layers_are_one_row() {
        let layers = ["Net.h.0.act: GELU", "Net.h.1.act: GELU", "Net.h.2.act: GELU", "Net.h.2.fc: Linear", "Net"];
        assert_eq!(names(&layers), ["h.0 … 2.act (3×)", "Net", "h.2.fc"]);
        // These modules have the same type, and some layers are missing.
        let parts = ["Net.0: Linear", "Net.1: GELU", "Net.3: Linear"];
        assert_eq!(names(&parts), ["0, 3 Linear (2×)", "1 GELU"]);
        assert_eq!(
            names(&["Net.layer_0.conv1: Conv2d", "Net.layer_11.conv1: Conv2d", "Net.layer_0.conv2: Conv2d"]),
            ["layer_0, 11.conv1 Conv2d (2×)", "layer_0.conv2 Conv2d"]
        );
        assert_eq!(names(&["A.fc: Linear", "B.fc: Linear", ""]), [NO_MODULE, "A.fc", "B.fc"]);
    }
}
