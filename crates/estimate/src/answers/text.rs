//! Writes results as text of at most 80 columns, in the style of gpumem's other reports.

use std::{cmp::Reverse, collections::HashMap, fmt};

use gpumem_core::export::{Amounts, Cell, Fit, Leaf, Paint, Role, Row, Show, Table, Tree, grouped, part_table_in};

use super::{Saving, Savings};
use crate::{Bytes, Class, ConvolutionWorkspace, Estimate, OptimizerParts, PeakPart, TensorSum, Tensors};

/// Reports show at most this many rows of layers.
const MOST_LAYERS: usize = 24;

/// Returns the main values, in the unit of the whole report.
fn sizes(rows: &[(String, Bytes)], amounts: Amounts) -> Table {
    let mut table = Table::new().column("", Fit::LeftCutEnd).amounts("", amounts);
    for (name, bytes) in rows {
        table.row([Cell::from(name), amounts.show(bytes.signed()).into()]);
    }
    table
}

gpumem_core::plain_display!(Estimate, Savings, Tensors);

/// Writes the parts of the peak by class and by layer, and the peaks of the phases.
impl Show for Estimate {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let Self { parameters, parameter_bytes, peak, reserved, .. } = self;
        let mut rows = vec![
            ("peak".to_owned(), *peak),
            ("the allocator has at most".to_owned(), *reserved),
            (format!("{} parameters", grouped(*parameters)), *parameter_bytes),
        ];
        // cuDNN's workspaces are a range. The values above are its low end.
        if let Some(ConvolutionWorkspace { peak: highest, reserved, .. }) = self.convolutions {
            rows.insert(1, ("… with the largest workspaces".to_owned(), highest));
            rows.insert(3, ("… with the largest workspaces".to_owned(), reserved));
        }
        let amounts = Amounts::of(rows.iter().map(|(_, bytes)| bytes.signed()));
        let show = |bytes: Bytes| amounts.show(bytes.signed());
        let mut range = vec![show(*peak)];
        range.extend(self.convolutions.map(|with| show(with.peak)));
        range.dedup();
        let (range, unit) = (range.join(" to "), amounts.unit);
        writeln!(f, "{}", paint.on(Role::Heading, format_args!("the estimated peak is {range} {unit}")))?;
        sizes(&rows, amounts).show(f, paint)?;
        if let Some(ConvolutionWorkspace { high, .. }) = self.convolutions {
            let high = show(high);
            write!(f, "\ncuDNN chooses how a convolution is computed, with a workspace of 0 to {high} {unit}.")?;
        }
        let row = |name: String, bytes: Bytes| Row { name, bytes: bytes.signed(), ..Row::default() };
        let mut classes: Vec<_> =
            self.classes().into_iter().map(|(class, bytes)| row(class.name().to_owned(), bytes)).collect();
        classes.sort_by_key(|row| Reverse(row.bytes));
        // If the optimizer has only a state, one row is enough.
        if let Some(OptimizerParts { copies, state, temporary }) = self.optimizer.filter(|of| of.bytes() > of.state)
            && let Some(at) = classes.iter().position(|row| row.name == Class::Optimizer.name())
        {
            let named = [("copies in f32", copies), ("state", state), ("temporary, in the update", temporary)];
            let rows = named.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO);
            let rows = rows.map(|(name, bytes)| Row { depth: 1, ..row(name.to_owned(), bytes) });
            classes.splice(at + 1..=at, rows);
        }
        f.write_str("\n\n")?;
        part_table_in("at the peak, by class", &classes, amounts).show(f, paint)?;
        f.write_str("\n\n")?;
        let is_added = |part: &PeakPart| part.class == Class::Rounding;
        let parts = self.parts.iter().map(|part| (Some(&*part.phase), &*part.layer, part.bytes, is_added(part)));
        show_layers(f, paint, "at the peak, by layer", tree(parts), amounts)?;
        let mut phases: Vec<Row> = Vec::new();
        for phase in &self.phases {
            match phases.iter_mut().find(|row| row.name == phase.name) {
                Some(row) => row.bytes = row.bytes.max(phase.peak.signed()),
                None => phases.push(row(phase.name.to_owned(), phase.peak)),
            }
        }
        f.write_str("\n\n")?;
        part_table_in("peak while it runs", &phases, amounts).show(f, paint)
    }
}

fn show_layers(f: &mut fmt::Formatter<'_>, paint: Paint, what: &str, tree: Tree, amounts: Amounts) -> fmt::Result {
    let rows = tree.rows(MOST_LAYERS);
    part_table_in(what, &rows, amounts).show(f, paint)?;
    if rows.iter().any(|row| row.name.ends_with("×)")) {
        let what = "A row with × is the sum of that many equal layers.";
        write!(f, "\n{}", paint.on(Role::Faint, what))?;
    }
    Ok(())
}

/// Returns rows of layers, such as `model.layers.0 … 31 (32×)`, with their bytes: in total, and without those that the allocator added,
/// which differ between layers. Equal layers are one row.
fn runs<'a>(layers: impl IntoIterator<Item = (&'a str, [Bytes; 2])>) -> Vec<(String, Bytes)> {
    let of_layer = |(path, bytes): (&'a str, [Bytes; 2])| {
        let (before, last) = path.rsplit_once('.').unwrap_or(("", path));
        // A number counts only in the form that `numbered` writes, such as `7` but not `07`.
        let number: Option<u64> = last.parse().ok().filter(|number: &u64| number.to_string() == last);
        (if number.is_some() { before } else { path }, number, bytes)
    };
    let mut all: Vec<_> = layers.into_iter().map(of_layer).collect();
    all.sort_unstable();
    let runs = all.chunk_by(|(name, number, [_, each]), next| {
        number.is_some_and(|number| (*name, number.checked_add(1), *each) == (next.0, next.1, next.2[1]))
    });
    let row = |run: &[(&str, Option<u64>, [Bytes; 2])]| {
        let ((name, first, _), last) = (run[0], run[run.len() - 1].1);
        let dot = if name.is_empty() { "" } else { "." };
        let shown = match (first, last) {
            (Some(first), Some(last)) if first < last => format!("{name}{dot}{first} … {last} ({}×)", run.len()),
            (Some(number), _) => format!("{name}{dot}{number}"),
            _ => name.to_owned(),
        };
        (shown, run.iter().map(|(.., [bytes, _])| *bytes).sum())
    };
    runs.map(row).collect()
}

/// Returns a tree of layers, in phases if they have one. A part is a phase, the path of a layer, bytes, and whether the allocator added
/// these. A layer includes the layers inside it, see [`shown`].
fn tree<'a>(parts: impl Iterator<Item = (Option<&'a str>, &'a str, Bytes, bool)>) -> Tree {
    let mut phases: Vec<(_, HashMap<_, [Bytes; 2]>)> = Vec::new();
    for (phase, layer, bytes, is_added) in parts {
        let at = phases.iter().position(|(known, _)| *known == phase).unwrap_or_else(|| {
            phases.push((phase, HashMap::new()));
            phases.len() - 1
        });
        let layer = if layer.is_empty() { "(outside of all layers)" } else { shown(layer) };
        let [sum, each] = phases[at].1.entry(layer).or_default();
        *sum = *sum + bytes;
        if !is_added {
            *each = *each + bytes;
        }
    }
    let mut tree = Tree::new();
    for (phase, layers) in phases {
        let path: Vec<_> = phase.map(str::to_owned).into_iter().collect();
        for (name, bytes) in runs(layers) {
            tree.leaf(&path, Leaf { name, bytes: bytes.signed(), blocks: 0, note: None });
        }
    }
    tree
}

/// Returns the start of a path: up to the first number, as in `model.layers.0`, or else two names.
fn shown(path: &str) -> &str {
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let names = path.split('.').take(3).position(is_number).map_or(2, |at| at + 1);
    path.match_indices('.').nth(names - 1).map_or(path, |(dot, _)| &path[..dot])
}

/// Returns a percentage with its sign, such as `-12.3`. It is empty if `whole` is 0.
#[expect(clippy::cast_precision_loss, reason = "one decimal is printed")]
fn percent(part: i64, whole: i64) -> String {
    if whole == 0 { String::new() } else { format!("{:+.1}", part as f64 / whole as f64 * 100.0) }
}

/// Writes the weights of a file, by type and module. Other memory of a step is not included.
impl Show for Tensors {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let TensorSum { elements, bytes } = self.sum();
        let mut rows = vec![(format!("{} elements", grouped(elements)), bytes)];
        rows.extend(self.by_dtype().into_iter().map(|(dtype, sum)| (dtype, sum.bytes)));
        let amounts = Amounts::of([bytes.signed()]);
        let sum = format!("the weights have {} {}", amounts.show(bytes.signed()), amounts.unit);
        writeln!(f, "{}", paint.on(Role::Heading, sum))?;
        sizes(&rows, amounts).show(f, paint)?;
        f.write_str("\n\n")?;
        let tree = tree(self.all().iter().map(|tensor| (None, tensor.name.as_str(), tensor.bytes, false)));
        show_layers(f, paint, "by module", tree, amounts)?;
        let rest = "activations, gradients, caches and workspaces: unknown. A file of weights does not describe what a step computes.";
        f.write_str("\n")?;
        for line in rest.split_inclusive(". ") {
            write!(f, "\n{}", paint.on(Role::Faint, line.trim_end()))?;
        }
        Ok(())
    }
}

/// Writes one row for each change, and the reason if a change is not possible or saves nothing.
impl Show for Savings {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let base = self.peak.signed();
        let peaks = self.changes.iter().filter_map(|change| change.peak).map(Bytes::signed).chain([base]);
        let (amounts, highest) = (Amounts::of(peaks.clone()), peaks.max().unwrap_or(base));
        let mut table = Table::new()
            .column("one change", Fit::LeftCutEnd)
            .amounts("peak", amounts)
            .amounts("change", amounts)
            .column("%", Fit::Right)
            .column("", Fit::Left);
        let bar = |peak| Cell::bar(peak, highest);
        table.row(["none".into(), amounts.show(base).into(), Cell::default(), Cell::default(), bar(base)]);
        for Saving { change, peak, why_not, .. } in &self.changes {
            let Some(peak) = peak.map(Bytes::signed) else {
                let dash = || Cell::from("—");
                table.row([change.into(), dash(), dash(), dash(), Cell::default()]);
                table.note(1, why_not.as_deref().unwrap_or("not known"));
                continue;
            };
            let difference = peak - base;
            let (role, sign) = if difference > 0 { (Role::Less, "+") } else { (Role::More, "") };
            let shown = Cell::from(format!("{sign}{}", amounts.show(difference))).role(role);
            let percent = percent(difference, base).into();
            table.row([change.into(), amounts.show(peak).into(), shown, percent, bar(peak)]);
            if let Some(why_not) = why_not {
                table.note(1, why_not);
            }
        }
        table.show(f, paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_shown_up_to_a_number() {
        let paths = ["model.layers.0.mlp.up_proj", "features.12", "0.weight", "a.b.c", "a", "deep.er.3.x", "lm_head"];
        let expected = ["model.layers.0", "features.12", "0", "a.b", "a", "deep.er.3", "lm_head"];
        assert_eq!(paths.map(shown), expected);
    }

    /// What the allocator adds to one layer and not to the other makes no difference.
    #[test]
    fn equal_layers_are_one_row() {
        let layer = |name, bytes, each| (name, [bytes, each].map(Bytes::new));
        let all = [
            layer("model.layers.2", 5, 5),
            layer("model.layers.10", 6, 5),
            layer("model.layers.0", 7, 7),
            layer("model.layers.1", 5, 5),
            layer("model.layers.11", 5, 5),
            layer("model.norm", 5, 5),
            layer("3", 1, 1),
            layer("4", 1, 1),
            layer("model.layers.01", 5, 5),
        ];
        let rows: Vec<_> = runs(all).iter().map(|(name, bytes)| format!("{name}: {}", bytes.get())).collect();
        let expected = [
            "3 … 4 (2×): 2",
            "model.layers.0: 7",
            "model.layers.1 … 2 (2×): 10",
            "model.layers.10 … 11 (2×): 11",
            "model.layers.01: 5",
            "model.norm: 5",
        ];
        assert_eq!(rows, expected);
    }
}
