//! Tests `--max-size` and `--only-peak`.

use gpumem_recording::Reader;
use gpumem_tests::Random;

use super::*;

/// Returns the sizes of the blocks that are live after this many calls of `until_killed`.
fn expected_live(calls: u64) -> Vec<u64> {
    let (mut live, mut made) = (Vec::new(), 0);
    for number in 1.. {
        for is_alloc in [true, false].into_iter().take(if number % 2 == 0 { 2 } else { 1 }) {
            if made == calls {
                return live;
            }
            made += 1;
            if is_alloc {
                live.push(512 * number);
            } else {
                live.pop();
            }
        }
    }
    live
}

#[test]
fn the_latest_part_is_kept_and_what_is_live_is_known() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let mut random = Random::new(3);
    let mut most = 0;
    for _ in 0..6 {
        let until = format!("until_killed {} 30000", random.below(300_000_u64));
        let outcome =
            run_with(&machine(), &["--max-size", "64KiB"], &file, &[&ALLOCATES[..3], &[until.as_str()]].concat());
        assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
        assert_eq!(folder.names(), ["a.capture"], "{outcome}");
        // The file may be longer than the limit: live blocks take some of it, and the functions of stacks are added at the end.
        let length = fs::metadata(&file).unwrap().len();
        assert!(length < 128 << 10, "{length}");
        let mut reader = Reader::new(File::open(&file).unwrap()).unwrap();
        while reader.step().unwrap().is_some() {}
        assert!(reader.skipped().is_nothing() && reader.end() == Some(&End::Complete), "{:?}", reader.skipped());
        let returned: u64 = outcome.stdout.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0);
        let mut live: Vec<u64> = reader.ledger().blocks(None).iter().map(|block| block.bytes.get()).collect();
        live.sort_unstable();
        assert!(
            [returned, returned + 1].map(expected_live).contains(&live),
            "{} blocks after {returned} calls",
            live.len()
        );
        if let Some(part) = reader.definitions().part() {
            assert!(!part.is_peaks && part.after > 0);
            assert!(
                outcome.stderr.contains(&format!("The first {} events are not in the recording", part.after)),
                "{outcome}"
            );
            most = most.max(part.after);
        }
    }
    assert!(most > 1_000, "{most}");
}

#[test]
fn only_the_peak_is_kept() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let churn = ["call cuMemAlloc_v2 &b 1048576", "call cuMemFree_v2 b"].repeat(50);
    let steps = [&ALLOCATES[..4], &churn, &ALLOCATES[4..], &churn, &["call cuMemAlloc_v2 &late 2097152"]].concat();
    let outcome = run_with(&machine(), &["--only-peak"], &file, &steps);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(recorded(&file), RecordingContent { bytes: vec![4 << 20, 32 << 20, 2 << 20], frees: 1 }, "{outcome}");
    for part in ["the peak was 36 MiB", "2 blocks (6 MiB) were not freed", "(--only-peak)"] {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
    assert_eq!(folder.names(), ["a.capture"]);
}

/// The second process ends before its peak is in the file.
#[test]
fn a_limit_does_not_pass_without_a_process_whose_peak_was_not_written() {
    let folder = Folder::new();
    let (probe, steps) = (probe(), in_shell(&ALLOCATES));
    let script = format!("{probe}{steps}; RANK=1 {probe}{steps} abort; exit 0");
    let (file, options) = (folder.file("a.capture"), ["--only-peak", "--max-peak", "1GiB"]);
    let words = [&["run", "-o", &file], &options[..], &["--", "bash", "-c", &script]].concat();
    let outcome = machine().run_program(&built("gpumem-command"), &words);
    assert_eq!(outcome.exit(), "exit status: 1", "{outcome}");
    for part in
        ["; --only-peak writes the recording each second: ", ": its limits cannot be checked: its process could not"]
    {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
}

#[test]
fn a_size_is_checked() {
    let file = Folder::new().file("a.capture");
    for (size, why) in [("many", "many"), ("1KiB", "it is less than 64 KiB")] {
        let outcome = run_with(&machine(), &["--max-size", size], &file, &[]);
        assert!(outcome.exit() == "exit status: 2" && outcome.stderr.contains(why), "{outcome}");
    }
}
