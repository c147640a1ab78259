//! Tests collectives of NCCL in dry runs. A library in C stands in for NCCL.

use super::*;

#[test]
fn collectives_are_skipped_in_a_dry_run() {
    let folder = Folder::new();
    let program = compiled(&folder, "nccl", "nccl.c", "libnccl.so.2", &[]);
    let with = |options: &[&str], arguments: &[&str]| {
        let file = folder.file("a.capture");
        let words = [&["run", "--stacks", "none"], options, &["-o", &file, "--", &program], arguments].concat();
        machine().run_program(&built("gpumem-command"), &words)
    };
    let dry = with(&["--dry", "--real", "2MiB"], &[]);
    assert!(dry.succeeded(), "{dry}");
    // The stand-in driver counts each copy twice, because it checks both buffers.
    let expected = "reduce large 0: 0\nsend 0: 0\nreduce 0: 2\nreduce in place 0: 0\ngather 0: 6\nscatter 0: 2\nbroadcast 0: 2\nbroadcast of another 0: 0\n";
    assert_eq!(dry.stdout, expected, "{dry}");
    // Without a dry run, NCCL itself is called.
    for options in [&[][..], &["--limit", "1GiB"]] {
        let real = with(options, &[]);
        assert_eq!(real.stdout, "NCCL is called\n", "{real}");
    }
    // One process has several ranks, which NCCL rejects on one GPU. gpumem makes each process a separate machine for NCCL,
    // because NCCL also rejects several ranks of one machine on one GPU.
    let cards = with(&["--dry", "--cards", "3"], &["all"]);
    let expected = "communicators 0: rank 2 of 3, a machine of its own\nall gathers 0: 6\nend: 0 4\n";
    assert_eq!(cards.stdout, expected, "{cards}");
    let one = with(&["--dry"], &["all"]);
    assert_eq!(one.stdout, "communicators 5: rank 0 of 0, this machine\nend: 4 4\n", "{one}");
}
