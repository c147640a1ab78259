//! Tests that the recording of an estimate has the same numbers as the estimate. The recording is the stream of events of the
//! step.

use std::{collections::BTreeMap, io::Cursor};

use gpumem_core::report::PeakHolder;
use gpumem_estimate::{AllocatorKind, Estimate, Model, Optimizer, Step, models};
use gpumem_recording::Reader;

fn check(step: &Step, model: &Model) -> Estimate {
    let (estimate, recording) = step.record(model).unwrap();
    assert_eq!(estimate, step.estimate(model).unwrap(), "recording changes nothing");
    let mut reader = Reader::new(Cursor::new(recording)).unwrap();
    while reader.step().unwrap().is_some() {}
    assert!(reader.skipped().is_nothing(), "{:?}", reader.skipped());

    let device = reader.ledger().stats()[0].device;
    let peak = reader.device_peak(device).unwrap();
    assert_eq!((peak.bytes, peak.untracked, peak.lost), (estimate.peak, 0, 0));
    let mut parts = BTreeMap::new();
    for part in &estimate.parts {
        let layers = part.layer.split('.').filter(|layer| !layer.is_empty());
        let path: Vec<_> = [part.phase.as_str()].into_iter().chain(layers).map(str::to_owned).collect();
        *parts.entry((path, part.class.name().to_owned())).or_insert(0) += part.bytes.get();
    }
    let holder = |holder: PeakHolder| {
        let path: Vec<_> = holder.path.iter().flat_map(|name| name.split('.')).map(str::to_owned).collect();
        ((path, holder.library.unwrap()), holder.bytes.get().unsigned_abs())
    };
    let holders: BTreeMap<_, _> = peak.holders.into_iter().map(holder).collect();
    assert_eq!(holders, parts);

    let summary = reader.summary().unwrap();
    let scope = |path: &[&str]| summary.scopes.iter().find(|scope| scope.path == path).unwrap();
    assert_eq!(scope(&[]).peak, estimate.peak);
    for name in ["forward", "backward", "update"] {
        let highest = estimate.phases.iter().filter(|phase| phase.name == name).map(|phase| phase.peak).max();
        if let Some(highest) = highest {
            assert_eq!((scope(&[name]).device_peak, scope(&[name]).calls), (highest, 2), "{name}");
        }
    }
    estimate
}

#[test]
fn a_recording_has_the_numbers_of_the_estimate() {
    let training = Step::training(4, Optimizer::Adam);
    let estimate = check(&training, &models::vgg19());
    assert!(estimate.parts.iter().any(|part| part.class.name() == "rounding"));
    check(&Step { allocator: AllocatorKind::Exact, ..training }, &models::vgg19());
    check(&Step::inference(1), &models::gpt2(64));
}
