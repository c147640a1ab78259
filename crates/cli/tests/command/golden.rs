//! Compares the reports of the recordings in `tests/data` with the text next to them: each `.txt` file contains commands, and
//! what they print.
//!
//! `training.capture` is a training run with PyTorch's tensors, and `events.capture` has each kind of event on two devices.
//! `unfinished.capture` is a recording of the latest events whose process was killed, with its newer part, its older part and
//! PyTorch's history. `gpt2.capture`, `vit.capture` and `compiled.capture` are training steps with PyTorch 2.11 on an H200, the
//! last one with `torch.compile`. `programs.txt` shows which functions are left out of their calls. `snapshot.txt` shows the
//! PyTorch snapshots that `snapshot.rs` describes. `resnet.capture` and `graph.capture` have the requests of PyTorch 2.11 on
//! an H200, with image sizes that change and with a CUDA graph. PyTorch's default settings were added to both by hand, and also
//! the pool of the graph: it is the pool with which the replay agrees. `replay.txt` shows the effect of other settings of
//! PyTorch's allocator.

use std::{fs, path::PathBuf};

use crate::{Ran, folder, within};

/// Returns the path of a file in `tests/data`.
pub(crate) fn data(name: &str) -> String {
    format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn recordings_give_the_reports_beside_them() {
    let data = PathBuf::from(data(""));
    let folder = folder("golden");
    let files = || fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path());
    for from in files() {
        fs::copy(&from, folder.join(from.file_name().unwrap())).unwrap();
    }
    for expected in files().filter(|path| path.extension().is_some_and(|extension| extension == "txt")) {
        let expected = fs::read_to_string(expected).unwrap();
        let commands: Vec<&str> = expected.lines().filter_map(|line| line.strip_prefix("$ gpumem ")).collect();
        assert!(commands.len() > 5);
        let mut printed = String::new();
        for command in commands {
            let arguments: Vec<&str> = command.split(' ').collect();
            let Ran { stdout, stderr, .. } = within(&folder, &arguments);
            printed += &["$ gpumem ", command, "\n", &stdout, &stderr].concat();
        }
        assert_eq!(printed, expected);
    }
    let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let left = left.iter().filter(|name| name.to_string_lossy().starts_with("unfinished.capture")).count();
    assert_eq!(left, 1, "what lay beside the recording is in it: {left}");
}
