//! The memory that changes of a step would save.

use std::{cmp::Reverse, collections::BTreeMap};

use gpumem_core::model::ByteDelta;
use serde::Serialize;

use crate::{
    Bytes, Class, DataParallel, DataParallelKind, Dtype, Error, Estimate, Lora, Model, Optimizer, Quantized, Result,
    Step,
};

/// The memory that some changes of a step would save, each by itself. `Display` is a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Savings {
    /// The peak of the unchanged step.
    pub peak: Bytes,
    /// The changes, in the order of the table.
    pub changes: Vec<Saving>,
}

/// A change of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Saving {
    /// The name of the change, such as `AdamW with 8 bits`.
    pub change: String,
    /// The changed step.
    pub step: Step,
    /// The peak of the changed step. `None` if it has none; see `why_not` for the reason.
    pub peak: Option<Bytes>,
    /// The reason why the model or the step cannot have this change, or why it saves nothing.
    pub why_not: Option<String>,
}

/// The rank of the adapters that are tried.
const RANK: u64 = 16;
/// The number of GPUs in changes that use several of them. Each GPU reads its own batch.
const RANKS: u64 = 8;

/// Explains why a change saves nothing, by the classes that differ most at the peaks.
fn why_nothing(before: &Estimate, after: &Estimate) -> String {
    const MOST: usize = 3;

    let mut differences: BTreeMap<Class, i64> = BTreeMap::new();
    for (classes, sign) in [(before.classes(), -1), (after.classes(), 1)] {
        for (class, bytes) in classes {
            *differences.entry(class).or_default() += sign * bytes.signed();
        }
    }
    let mut differences: Vec<_> = differences.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    differences.sort_by_key(|(_, bytes)| Reverse(bytes.unsigned_abs()));
    let shown = |(class, bytes): &(Class, i64)| {
        let sign = if *bytes > 0 { "+" } else { "" };
        format!("{class} {sign}{}", ByteDelta::new(*bytes))
    };
    let shown: Vec<_> = differences.iter().take(MOST).map(shown).collect();
    if shown.is_empty() {
        "it changes nothing at the peak".to_owned()
    } else {
        format!("no saving: {}", shown.join(", "))
    }
}

impl Step {
    /// Estimates the step with each change by itself: checkpointing, smaller types, an optimizer with a smaller state,
    /// adapters, several GPUs. If the model cannot have a change, or if it saves nothing, the reason is given. A change
    /// that the step already has is left out.
    ///
    /// # Errors
    /// Returns an error if the step without changes cannot run with the model.
    pub fn savings(&self, model: &Model) -> Result<Savings> {
        // A step that does not fit now may fit with a change, so there is no limit here.
        let base = Self { limit: None, ..self.clone() };
        let estimate = base.estimate(model)?;
        let peak = estimate.peak;
        let change = |(change, step): (String, Self)| {
            let changed = || {
                let changed = Bytes::new(step.peak(model)?.0);
                // The parts of the peak are computed only if they are needed, because that takes longer.
                let after = if changed < peak { None } else { Some(step.estimate(model)?) };
                Ok((Some(changed), after.map(|after| why_nothing(&estimate, &after))))
            };
            let (peak, why_not) = changed().unwrap_or_else(|error: Error| (None, Some(error.to_string())));
            Saving { change, step, peak, why_not }
        };
        Ok(Savings { peak, changes: base.changes().into_iter().map(change).collect() })
    }

    fn changes(&self) -> Vec<(String, Self)> {
        let same = || self.clone();
        let is_training = self.optimizer.is_some();
        let mut changes = Vec::new();
        let mut add = |is_new: bool, name: &str, step: Self| {
            if is_new && step != *self {
                changes.push((name.to_owned(), step));
            }
        };
        let is_wide = self.parameters == Dtype::F32 || self.parameters == Dtype::F64;
        add(is_training, "checkpointing of each block", Self { checkpointing: true.into(), ..same() });
        let is_first = self.autocast.is_none() && is_wide;
        add(is_first, "autocast to bf16", Self { autocast: Some(Dtype::Bf16), ..same() });
        add(is_wide, "parameters in bf16", Self { parameters: Dtype::Bf16, autocast: None, ..same() });
        let has_adam = self.optimizer == Some(Optimizer::Adam);
        add(has_adam, "AdamW with 8 bits", Self { optimizer: Some(Optimizer::Adam8bit), ..same() });
        add(is_training, "Adafactor", Self { optimizer: Some(Optimizer::Adafactor), ..same() });
        add(is_training, "SGD", Self { optimizer: Some(Optimizer::Sgd), ..same() });
        let lora = || Some(Lora { rank: RANK, targets: ["*"].into(), dropout: 0.0 });
        let is_whole = is_training && self.adapters.is_none();
        add(is_whole, &format!("LoRA, rank {RANK}"), Self { adapters: lora(), ..same() });
        let quantized = || Some(Quantized::default());
        let is_whole = is_whole && self.quantized.is_none();
        let qlora = Self { adapters: lora(), quantized: quantized(), ..same() };
        add(is_whole, &format!("QLoRA, rank {RANK}"), qlora);
        let is_whole = !is_training && self.quantized.is_none() && !self.parameters.is_only_stored();
        add(is_whole, "weights in 4 bits", Self { quantized: quantized(), ..same() });
        let is_alone = is_training && self.data_parallel.is_none();
        let stages = [DataParallelKind::Zero1, DataParallelKind::Zero2, DataParallelKind::Zero3];
        for (stage, kind) in (1..).zip(stages) {
            let data_parallel = Some(DataParallel { kind, ranks: RANKS, gathered: None });
            add(is_alone, &format!("ZeRO-{stage} over {RANKS} GPUs"), Self { data_parallel, ..same() });
        }
        changes
    }
}
