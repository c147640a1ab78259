//! This target reads snapshots of PyTorch: any pickle is a history or an error, and its time and memory depend on its
//! size.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;

#[path = "../../gpumem-cli/src/recording/torch/history.rs"]
mod history;
#[path = "../../gpumem-cli/src/recording/torch/objects.rs"]
mod objects;
#[path = "../../gpumem-cli/src/recording/torch/passes.rs"]
mod passes;
#[path = "../../gpumem-cli/src/recording/torch/pickle.rs"]
mod pickle;
mod seeds;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let length = data.len() as u64;
    let mut objects = objects::Objects::new(length);
    let Ok(snapshot) = pickle::read(data, length, &mut objects) else { return };
    let Ok(history) = objects.history(snapshot) else { return };
    let events: u64 = history.devices.iter().map(|device| device.trace.count()).sum();
    assert!(events <= length, "no event is there twice");
});

fn write_seeds() {
    let file = |name| seeds::file(&format!("gpumem-cli/tests/data/snapshot-{name}.pickle"));
    let names = ["2", "3", "4", "5", "h200"];
    seeds::write("snapshots", names.map(|name| fs::read(file(name)).expect("the snapshot is there")));
}
