//! Tests that `kill -9` loses no recorded event.

use std::{collections::HashSet, thread};

use gpumem_core::model::StackId;
use gpumem_driver::ring_memory::SharedMemory;
use gpumem_recording::{CodeAddress, Item, Segments, items_of};
use gpumem_tests::{Random, built};

use super::*;

/// Kills 40 programs. The calls of a program that had returned when it was killed must be in its recording.
#[test]
fn a_killed_program_loses_no_event() {
    // There are several threads, because each waits for its programs most of the time.
    let threads: [_; 4] =
        std::array::from_fn(|thread| thread::spawn(move || killed_programs(Random::new(20 + thread as u64), 10)));
    let returned: Vec<usize> =
        threads.into_iter().flat_map(|thread| thread.join().expect("no event was lost")).collect();
    let (most, all) = (returned.iter().max().copied().unwrap_or(0), returned.iter().sum::<usize>());
    assert!(most > 1_000 && all > most, "{most} {all}");
}

/// Kills programs at random moments, and compares their output with their recordings. Returns the number of calls that returned
/// in each program.
fn killed_programs(mut random: Random, rounds: u32) -> Vec<usize> {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let killed = |round| {
        // On a slow machine, a program makes few calls before it is killed. Therefore every second round first waits for a number
        // of calls.
        let (micros, after) = if round % 2 == 0 { (3_000, 0) } else { (200_000, random.below(5_000_u64)) };
        let until = format!("until_killed {} {after}", random.below(micros));
        let outcome = run_probe(&machine(), &file, &[&ALLOCATES[..3], &[until.as_str()]].concat());
        assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
        let returned: usize = outcome.stdout.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0);
        if !Path::new(&file).exists() {
            // A process that allocated nothing leaves no recording.
            assert_eq!(returned, 0, "{outcome}");
            return returned;
        }
        let recorded = recorded(&file);
        let events = recorded.bytes.len() + recorded.frees;
        // The last call may be recorded although it has not returned.
        assert!((returned..=returned + 1).contains(&events), "{events} of {returned} events\n{}", outcome.stderr);
        assert!(recorded.bytes.iter().zip(1..).all(|(bytes, number)| *bytes == 512 * number));
        assert_eq!(folder.names(), ["a.capture"]);
        fs::remove_file(&file).expect("it is there");
        returned
    };
    (0..rounds).map(killed).collect()
}

/// Returns the stacks of allocations that the recording does not define completely, and the number of allocations with a stack.
#[track_caller]
fn stacks_without_frames(file: &str) -> (Vec<StackId>, usize) {
    let (items, _) = items_of(File::open(file).expect("it is there")).expect("it can be read");
    let modules: HashSet<u32> = items
        .iter()
        .filter_map(|item| match item {
            Item::Module(module) if !module.build_id.is_empty() => Some(module.id),
            _ => None,
        })
        .collect();
    let symbols: HashSet<_> = items
        .iter()
        .filter_map(|item| if let Item::Symbols(symbols) = item { Some(symbols.address) } else { None })
        .collect();
    let is_known = |address: &CodeAddress| modules.contains(&address.module) || symbols.contains(address);
    let defined: HashSet<_> = items
        .iter()
        .filter_map(|item| match item {
            Item::Stack(stack) if stack.addresses.iter().all(is_known) => Some(stack.id),
            _ => None,
        })
        .collect();
    let stack = |item: &Item| match item {
        Item::Event(event) if matches!(event.kind, EventKind::Alloc { block, .. } if !block.kind.is_taken_by_driver()) => {
            event.kind.stack()
        }
        _ => None,
    };
    let stacks: Vec<_> = items.iter().filter_map(stack).collect();
    (stacks.iter().filter(|stack| !defined.contains(stack)).copied().collect(), stacks.len())
}

/// The program uses new stacks until it is killed, so the thread that writes the recording has not read the last ones yet.
#[test]
fn a_killed_program_loses_no_stack() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let mut random = Random::new(21);
    let mut all = 0;
    for _ in 0..10 {
        let until = format!("killed_on_new_stacks {}", random.below(12_000_u64));
        let outcome = run_probe(&machine(), &file, &[&ALLOCATES[..3], &[until.as_str()]].concat());
        assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
        if Path::new(&file).exists() {
            let (without, events) = stacks_without_frames(&file);
            assert_eq!(without, [], "of {events} events\n{outcome}");
            all += events;
            fs::remove_file(&file).expect("it is there");
        }
    }
    assert!(all > 0, "nothing was recorded");
}

/// A killed process counts as holding its memory until it was killed. Here another process allocates after the last event of that
/// process.
#[test]
fn a_killed_program_had_its_memory_until_its_end() {
    let folder = Folder::new();
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let allocates = [&ALLOCATES[..3], &["call cuMemAlloc_v2 &kept 8388608"]].concat();
    let (first, second) = (in_shell(&[&allocates[..], &["await_file never"]].concat()), in_shell(&allocates));
    let text = format!(
        "cd {folder}
         {gpumem} run -o a.capture --max-peak 12MiB -- sh -c \"{probe}{first} > first & pid=\\$!
             until [ \\$(grep -c . first) = 4 ]; do sleep 0.01; done; {probe}{second}; kill -9 \\$pid; true\" > /dev/null 2> errors
         code=$?; cat errors; exit $code",
        folder = folder.0.path().display(),
    );
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
    assert_eq!(outcome.exit(), "exit status: 1", "{outcome}");
    // If the process is killed before the UUID of its device is recorded, as on a busy machine, the line says `may have had`
    // instead of `had`.
    assert!(outcome.stdout.contains("had 16 MiB at the same time, 4 MiB above the limit of 12 MiB: "), "{outcome}");
}

/// Each allocation is on its own line. The line after the last allocation kills the process.
const KILLED_TRAIN: &str = "\
import ctypes, os, sys
cuda = ctypes.CDLL('libcuda.so.1')
context, address = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
calls = int(sys.argv[1])
lines = ['cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))'] * calls + ['os.kill(os.getpid(), 9)']
exec(compile('\\n'.join(lines), 'made.py', 'exec'))
";

#[test]
fn a_killed_program_loses_no_line_of_python() {
    let folder = Folder::new();
    let Some(python) = python() else { return };
    let (file, script) = (folder.file("a.capture"), folder.file("train.py"));
    fs::write(&script, KILLED_TRAIN).unwrap();
    let mut random = Random::new(22);
    for _ in 0..5 {
        let calls = 1 + random.below(60_u64);
        let outcome = run(&machine(), &file, &[&python, &script, &calls.to_string()]);
        assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
        let (without, events) = stacks_without_frames(&file);
        assert_eq!((without, events as u64), (vec![], calls), "{outcome}");
        let (items, _) = items_of(File::open(&file).unwrap()).unwrap();
        let lines: HashSet<_> = items
            .iter()
            .filter_map(|item| if let Item::Symbols(symbols) = item { symbols.symbols.first() } else { None })
            .filter(|symbol| symbol.file.as_deref() == Some("made.py"))
            .filter_map(|symbol| symbol.line)
            .collect();
        assert_eq!(lines, (1..=u32::try_from(calls).unwrap()).collect(), "{outcome}");
        fs::remove_file(&file).expect("it is there");
    }
}

/// Kills `gpumem run`, and then the program while it allocates. Returns the path of the recording and the number of calls that
/// had returned.
fn both_killed(folder: &Folder) -> (String, usize) {
    let file = folder.file("a.capture");
    let steps = in_shell(&[&ALLOCATES[..3], &["until_killed 50000 1000"]].concat());
    let gpumem = built("gpumem-command");
    let pid = folder.file("pid");
    // `gpumem run` must be gone before the program ends, so the shell kills it before it becomes the program.
    let kill = format!("kill -9 $PPID; echo $$ > {pid}; exec {}{steps} > {}", probe(), folder.file("calls"));
    let until_gone = format!(
        "while ! read pid < {pid}; do sleep 0.01; done; \
         while grep -q '^State:.[^ZX]' /proc/$pid/task/*/status; do sleep 0.01; done"
    );
    let script = format!(
        "{} run -o {file} -- sh -c \"{}\"; {{ {until_gone}; }} 2> /dev/null; true",
        gpumem.display(),
        kill.replace('$', "\\$")
    );
    let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
    let names = folder.names();
    let recording =
        names.iter().find(|name| name.starts_with("a.pid")).unwrap_or_else(|| panic!("{names:?}\n{outcome}"));
    let calls = fs::read_to_string(folder.file("calls")).unwrap();
    let returned = calls.lines().filter_map(|line| line.parse().ok()).max().unwrap();
    let recording = folder.file(recording);
    assert!(returned > 100 && lacks_end(&recording), "{returned}\n{outcome}");
    (recording, returned)
}

/// `gpumem run` would add the content of the ring to the recording. If it was killed as well, the next report adds the content.
#[test]
fn a_report_has_what_a_killed_program_recorded_last() {
    let folder = Folder::new();
    let (recording, returned) = both_killed(&folder);
    // Several reports run at the same time, and one of them adds the content.
    let gpumem = built("gpumem-command");
    let reports = format!("for report in 1 2 3 4; do {} report {recording} & done; wait", gpumem.display());
    let report = machine().run_program("/bin/sh".as_ref(), &["-c", &reports]);
    let is_wait = |line: &str| line.starts_with("gpumem: waiting for another process, which completes ");
    assert!(report.is_clean() && report.stderr.lines().all(is_wait), "{report}");
    assert!(!lacks_end(&recording));
    let recorded = recorded(&recording);
    let events = recorded.bytes.len() + recorded.frees;
    assert!((returned..=returned + 1).contains(&events), "{events} of {returned}");
    let said = format!(": {} allocations", recorded.bytes.len());
    assert_eq!(report.stdout.matches(&said).count(), 4, "{report}");
}

/// The ring is missing, because another process has removed it or the machine was restarted.
#[test]
fn a_report_says_if_what_was_recorded_last_is_lost() {
    let folder = Folder::new();
    let (recording, returned) = both_killed(&folder);
    let (items, _) = items_of(File::open(&recording).unwrap()).unwrap();
    let segment = items.iter().find_map(|item| if let Item::Ring(ring) = item { ring.segment } else { None });
    SharedMemory.remove(segment.expect("the ring is in shared memory"));
    let report = machine().run_program(&built("gpumem-command"), &["report", &recording]);
    let text = "The file has no end: its process still records, or could not write it, or was killed, which loses up to 0.2 seconds";
    assert!(report.stdout.contains(text), "{report}");
    let recorded = recorded(&recording);
    assert!(recorded.bytes.len() + recorded.frees <= returned);
}

/// If gpumem mapped a file, the program would be killed if another process truncated the file or if the disk was full.
#[test]
fn no_file_is_mapped_into_the_program() {
    let folder = Folder::new();
    let maps = ["maps .capture", "maps libgpumem", "maps SYSV"];
    let outcome = run_probe(&machine(), &folder.file("a.capture"), &[&ALLOCATES[..], &maps].concat());
    assert_eq!(maps.map(|step| outcome.answer(step)), ["no", "no", "yes"], "{outcome}");
}
