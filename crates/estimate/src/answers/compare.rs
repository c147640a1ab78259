//! The difference between an estimate and a measured run.

use std::collections::BTreeMap;

use gpumem_core::{
    model::{Bytes, Trace},
    report::{PeakHolder, PeakHolders},
};
use serde::{Deserialize, Serialize};

use crate::{class::Class, estimate::Estimate};

/// The measured memory of a run.
///
/// Unknown values are missing: an estimate is compared only with measured values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Measured {
    /// The peak of tensors and workspaces, which is compared with `Estimate.peak`.
    pub allocated: Option<Bytes>,
    /// The most memory that the framework's allocator held from the driver, which is compared with `Estimate.reserved`.
    pub reserved: Option<Bytes>,
    /// The bytes of each class at the peak, where known. The rest of `allocated` belongs to the other classes.
    pub classes: BTreeMap<Class, Bytes>,
    /// The bytes that were allocated in each phase and in use at the peak, by the name of the phase: `model`, `input`,
    /// `forward`, `backward`, `update`.
    pub phases: BTreeMap<String, Bytes>,
}

/// The difference between an estimate and a measured run. `Display` is a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The peaks, if both are known.
    pub peak: Option<Difference>,
    /// The allocator's memory from the driver, if both are known.
    pub reserved: Option<Difference>,
    /// The peaks by class. Classes that the measured run could not distinguish are joined.
    pub classes: Vec<ClassDifference>,
    /// The peaks by the phase that allocated.
    pub phases: Vec<PhaseDifference>,
}

/// Two amounts of the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Difference {
    /// The estimated amount.
    pub estimated: Bytes,
    /// The measured amount.
    pub measured: Bytes,
    /// The upper end of the estimate, if it is a range that starts at `estimated`, because of workspaces of
    /// convolutions.
    pub at_most: Option<Bytes>,
}

/// The difference between the sums of some classes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClassDifference {
    /// The classes that are added up.
    pub classes: Vec<Class>,
    /// Their difference.
    pub difference: Difference,
}

/// The difference of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseDifference {
    /// The name of the phase.
    pub phase: String,
    /// The difference between the estimate and the measured amount.
    pub difference: Difference,
}

impl Difference {
    fn new(estimated: Bytes, measured: Bytes) -> Self {
        Self { estimated, measured, at_most: None }
    }

    /// Returns the estimate minus the measured amount.
    pub fn bytes(&self) -> i64 {
        self.estimated.signed().saturating_sub(self.measured.signed())
    }

    /// Returns the error in percent of the measured amount. It is positive if the estimate is too high. `None` if
    /// nothing was measured.
    #[expect(clippy::cast_precision_loss, reason = "a percentage is printed with two digits")]
    pub fn percent(&self) -> Option<f64> {
        let measured = self.measured.get() as f64;
        (measured > 0.0).then(|| self.bytes() as f64 / measured * 100.0)
    }

    /// Returns whether the measured amount is in the range of the estimate. `None` if the estimate is not a range.
    pub fn is_in_range(&self) -> Option<bool> {
        self.at_most.map(|most| (self.estimated..=most).contains(&self.measured))
    }
}

impl Estimate {
    /// Compares the estimate with a measured run: its peaks, and the classes and phases that were distinguished.
    ///
    /// ```
    /// use gpumem_core::model::Bytes;
    /// use gpumem_estimate::{Class, Measured, Optimizer, Step, models};
    ///
    /// let estimate = Step::training(8, Optimizer::Adam).estimate(&models::gpt2(512))?;
    /// let mut measured = Measured::default();
    /// measured.allocated = Some(Bytes::gib(8));
    /// measured.classes.insert(Class::Weights, Bytes::mib(475));
    /// let comparison = estimate.compare(&measured);
    /// assert!(comparison.peak.unwrap().percent().unwrap().abs() < 10.0);
    /// assert_eq!(comparison.classes[0].classes, [Class::Weights]);
    /// assert!(comparison.classes[1].classes.contains(&Class::Activations), "{comparison:?}");
    /// # Ok::<(), gpumem_estimate::Error>(())
    /// ```
    pub fn compare(&self, measured: &Measured) -> Comparison {
        let peak = measured.allocated.map(|allocated| Difference {
            at_most: self.convolutions.map(|workspaces| workspaces.peak),
            ..Difference::new(self.peak, allocated)
        });
        let reserved = measured.reserved.map(|reserved| Difference {
            at_most: self.convolutions.map(|workspaces| workspaces.reserved),
            ..Difference::new(self.reserved, reserved)
        });
        let estimated: BTreeMap<Class, Bytes> = self.classes().into_iter().collect();
        let mut classes: Vec<_> = measured
            .classes
            .iter()
            .map(|(class, bytes)| {
                let estimated = estimated.get(class).copied().unwrap_or_default();
                let range = self.convolutions.filter(|_| *class == Class::Workspace);
                let at_most = range.map(|workspaces| estimated + workspaces.high);
                let difference = Difference { at_most, ..Difference::new(estimated, *bytes) };
                ClassDifference { classes: vec![*class], difference }
            })
            .collect();
        let known: Bytes = measured.classes.values().copied().sum();
        if let Some(rest) = measured.allocated.and_then(|allocated| allocated.checked_sub(known)) {
            let others = || estimated.iter().filter(|(class, _)| !measured.classes.contains_key(class));
            let sum = others().map(|(_, bytes)| *bytes).sum();
            if rest > Bytes::ZERO || sum > Bytes::ZERO {
                let (others, difference) = (others().map(|(class, _)| *class).collect(), Difference::new(sum, rest));
                classes.push(ClassDifference { classes: others, difference });
            }
        }
        let phase = |(phase, bytes): (&String, &Bytes)| {
            let parts = self.parts.iter().filter(|part| part.phase == *phase);
            let difference = Difference::new(parts.map(|part| part.bytes).sum(), *bytes);
            PhaseDifference { phase: phase.clone(), difference }
        };
        Comparison { peak, reserved, classes, phases: measured.phases.iter().map(phase).collect() }
    }
}

/// The libraries whose blocks are their workspaces.
const WORKSPACES: [&str; 6] = ["cuBLAS", "cuBLASLt", "cuDNN", "cuSOLVER", "cuSPARSE", "cuFFT"];
/// The library of PyTorch's allocator. Its blocks are segments.
const PYTORCH: &str = "PyTorch";

/// Uses the peak of a trace above the memory in use at its start. The trace must cover a whole step, with the model and
/// its inputs.
impl From<&Trace> for Measured {
    fn from(trace: &Trace) -> Self {
        let allocated = trace.is_measured().then(|| trace.peak_over_start());
        Self { allocated, ..Self::default() }
    }
}

/// Uses the parts of a peak: that of a program or of a recording (`device_peak`), or that of a trace (`peak_holders`).
///
/// - Blocks that libraries such as cuBLAS and cuDNN allocated are workspaces.
/// - Blocks in a scope with the name of a class (`weights`, `optimizer`) belong to that class; the innermost such scope
///   is used.
/// - The outermost scopes with the names of phases are the phases.
/// - Blocks of PyTorch are segments of its allocator: they show how much is reserved, but nothing about classes.
impl From<&PeakHolders> for Measured {
    fn from(peak: &PeakHolders) -> Self {
        let mut measured = Self::default();
        let bytes = |holder: &PeakHolder| Bytes::new(holder.bytes.get().max(0).unsigned_abs());
        let is_segment = |holder: &&PeakHolder| holder.library.as_deref() == Some(PYTORCH);
        let (segments, blocks): (Vec<_>, Vec<_>) = peak.holders.iter().partition(is_segment);
        if segments.is_empty() {
            measured.allocated = Some(peak.bytes);
        } else {
            // The memory of other libraries is outside the allocator, and the estimate of the allocator does not
            // include it.
            measured.reserved = Some(segments.into_iter().map(bytes).sum());
            return measured;
        }
        for holder in blocks {
            let class = match holder.library.as_deref() {
                Some(library) if WORKSPACES.contains(&library) => Some(Class::Workspace),
                // In a recorded estimate, the library is the class.
                Some(library) => Class::with_name(library),
                None => holder.path.iter().rev().find_map(|name| Class::with_name(name)),
            };
            let add = |sum: &mut Bytes| *sum = *sum + bytes(holder);
            if let Some(class) = class {
                add(measured.classes.entry(class).or_default());
            }
            if let Some(phase) = holder.path.first().filter(|name| PHASES.contains(&name.as_str())) {
                add(measured.phases.entry(phase.clone()).or_default());
            }
        }
        measured
    }
}

const PHASES: [&str; 7] = ["model", "input", "forward", "backward", "update", "prefill", "decode"];

#[cfg(test)]
mod tests {
    use gpumem_core::model::ByteDelta;

    use super::*;

    fn holder(path: &[&str], library: Option<&str>, mib: i64) -> PeakHolder {
        let mut holder = PeakHolder::default();
        holder.path = path.iter().map(|name| (*name).to_owned()).collect();
        holder.library = library.map(str::to_owned);
        holder.bytes = ByteDelta::new(mib << 20);
        holder
    }

    fn peak(holders: Vec<PeakHolder>) -> PeakHolders {
        let text = r#"{"device":0,"simulated":false,"bytes":0,"is_over_start":true,"holders":[],"pools":[],"untracked":0,"lost":0}"#;
        let mut peak: PeakHolders = serde_json::from_str(text).unwrap();
        peak.bytes = Bytes::new(holders.iter().map(|holder| holder.bytes.get().unsigned_abs()).sum());
        peak.holders = holders;
        peak
    }

    #[test]
    fn scopes_and_libraries_say_the_class() {
        let measured = Measured::from(&peak(vec![
            holder(&["model"], None, 100),
            holder(&["forward", "linear"], None, 30),
            holder(&["forward", "linear"], Some("cuBLAS"), 32),
            holder(&["update", "optimizer"], None, 200),
            holder(&[], None, 1),
        ]));
        assert_eq!(measured.allocated, Some(Bytes::mib(363)));
        let classes = [(Class::Optimizer, Bytes::mib(200)), (Class::Workspace, Bytes::mib(32))];
        assert_eq!(measured.classes, BTreeMap::from(classes), "the other blocks have no class");
        let phases = [("model", 100), ("forward", 62), ("update", 200)];
        assert_eq!(measured.phases, phases.map(|(name, mib)| (name.to_owned(), Bytes::mib(mib))).into());
    }

    #[test]
    fn segments_of_pytorch_say_what_is_reserved() {
        let measured = Measured::from(&peak(vec![holder(&[], Some("PyTorch"), 500), holder(&[], Some("cuBLAS"), 64)]));
        assert_eq!((measured.allocated, measured.reserved), (None, Some(Bytes::mib(500))));
        assert!(measured.classes.is_empty() && measured.phases.is_empty());
    }

    #[test]
    fn an_error_needs_something_measured() {
        let difference = Difference::new(Bytes::mib(95), Bytes::mib(100));
        assert_eq!((difference.bytes(), difference.percent()), (-5 << 20, Some(-5.0)));
        assert_eq!(Difference::new(Bytes::mib(1), Bytes::ZERO).percent(), None);
        assert_eq!(difference.is_in_range(), None);
        let range = Difference { at_most: Some(Bytes::mib(101)), ..difference };
        assert_eq!(range.is_in_range(), Some(true));
        assert_eq!(Difference { at_most: Some(Bytes::mib(99)), ..difference }.is_in_range(), Some(false));
    }
}
