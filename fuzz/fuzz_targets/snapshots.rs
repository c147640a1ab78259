//! This target reads snapshots of PyTorch: any pickle is a history or an error, and its time and memory depend on its
//! size.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/cli/src/recording/ranges.rs"]
mod ranges;
mod seeds;
/// The files have the same place as in the command.
#[path = "."]
mod torch {
    #[path = "../../crates/cli/src/recording/torch/before.rs"]
    mod before;
    #[path = "../../crates/cli/src/recording/torch/contradictions.rs"]
    mod contradictions;
    #[path = "../../crates/cli/src/recording/torch/history.rs"]
    mod history;
    #[path = "../../crates/cli/src/recording/torch/names.rs"]
    mod names;
    #[path = "../../crates/cli/src/recording/torch/objects.rs"]
    mod objects;
    #[path = "../../crates/cli/src/recording/torch/passes.rs"]
    mod passes;
    #[path = "../../crates/cli/src/recording/torch/pickle.rs"]
    mod pickle;

    /// Returns the number of events of a snapshot.
    pub fn events(data: &[u8]) -> std::io::Result<u64> {
        let length = data.len() as u64;
        let mut objects = objects::Objects::new(length);
        let snapshot = pickle::read(data, length, &mut objects)?;
        let history = objects.history(snapshot)?;
        Ok(history.devices.iter().map(|device| device.trace.count()).sum())
    }
}

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    if let Ok(events) = torch::events(data) {
        assert!(events <= data.len() as u64, "no event is there twice");
    }
});

fn write_seeds() {
    let file = |name| seeds::file(&format!("crates/cli/tests/data/snapshot-{name}.pickle"));
    let names = ["2", "3", "4", "5", "h200"];
    seeds::write("snapshots", names.map(|name| fs::read(file(name)).expect("the snapshot is there")));
}
