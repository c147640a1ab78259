//! Tests that a program ends in the same way when gpumem's files are changed while the program runs.

use std::{
    env,
    io::Write,
    os::unix::{fs::symlink, net::UnixStream},
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use gpumem_tests::{Random, built};

use super::*;

/// The variable that sets the number of runs. Without it, as in `.ci/run`, there are at most 15 runs, and none starts after a
/// minute.
const RUNS: &str = "GPUMEM_TEST_RUNS";

/// The number of files that were truncated, removed and replaced.
#[derive(Debug, Default)]
struct Done {
    truncated: u64,
    removed: u64,
    replaced: u64,
}

/// Returns all files below a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let (folders, mut files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir() && !path.is_symlink());
    files.extend(folders.iter().flat_map(|folder| files_below(folder)));
    files
}

/// Truncates, removes or replaces a file. The file may already be gone.
fn disturb(file: &Path, random: &mut Random, done: &mut Done) {
    let other = file.with_file_name("other");
    match random.below(8_u64) {
        0..3 => {
            let length = file.metadata().map_or(0, |known| known.len());
            let length = if random.below(2_u64) == 0 { 0 } else { random.below(length + 1) };
            let truncated = File::options().write(true).open(file).and_then(|open| open.set_len(length));
            done.truncated += u64::from(truncated.is_ok());
        }
        3..5 => done.removed += u64::from(fs::remove_file(file).is_ok()),
        kind => {
            // The new file is a text, a link to a missing file, or a pipe without a reader.
            let made = match kind {
                5 => fs::write(&other, "text"),
                6 => symlink("nothing", &other),
                _ => Command::new("mkfifo").arg(&other).status().map(drop),
            };
            done.replaced += u64::from(made.and_then(|()| fs::rename(&other, file)).is_ok());
        }
    }
}

/// Makes the other threads end when it is dropped, even if this thread panics.
struct EndsAtDrop<'a>(&'a AtomicBool);

impl Drop for EndsAtDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Disturbs the files in a folder until the program has ended.
fn disturb_until(folder: &Path, ended: &AtomicBool, random: &mut Random) -> Done {
    let mut done = Done::default();
    while !ended.load(Relaxed) {
        thread::sleep(Duration::from_micros(random.below(8_000_u64)));
        let files = files_below(folder);
        // An incomplete library crashes the program that loads it, and a pipe at its path would make the program wait. Therefore
        // gpumem's library is changed only after it was loaded.
        let is_loaded = files.iter().any(|file| file.extension().is_some_and(|end| end == "capture" || end == "sock"));
        let is_library = |file: &Path| file.to_string_lossy().contains("libgpumem");
        let may_change = |file: &&PathBuf| file.is_file() && (is_loaded || !is_library(file));
        let files: Vec<_> = files.iter().filter(may_change).collect();
        if !files.is_empty() {
            disturb(files[random.below(files.len())], random, &mut done);
        }
    }
    done
}

const DORMANT: u64 = 2;
const KNOWS_GPUMEM: u64 = 3;

/// Runs the probe, and records it in one of five ways. Two of the six numbers mean the way without options.
fn run_in(machine: &Standin, folder: &Folder, way: u64, steps: &[&str]) -> Outcome {
    let file = folder.file("a.capture");
    let options: &[&str] = match way {
        0 => &["--max-size", "64KiB"],
        1 => &["--only-peak"],
        DORMANT => &["--dormant"],
        KNOWS_GPUMEM => return machine.clone().env("GPUMEM_CAPTURE", file).run_program(&built("probe"), steps),
        _ => &[],
    };
    run_with(machine, options, &file, steps)
}

/// Starts the recording, like `gpumem start`, as soon as a program waits for that.
fn start(sockets: &Path, ended: &AtomicBool) {
    while !ended.load(Relaxed) {
        let mut entries = fs::read_dir(sockets).into_iter().flatten().flatten();
        let stream = entries.find_map(|entry| UnixStream::connect(entry.path()).ok());
        if stream.is_some_and(|mut stream| stream.write_all(b"start\n").is_ok()) {
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_program_ends_as_without_gpumem_whatever_happens_to_files() {
    let requested = env::var(RUNS).ok().map(|runs| runs.parse::<u64>().expect("it is a number"));
    let until = Instant::now() + Duration::from_secs(60);
    let mut random = Random::new(23);
    let mut all = Done::default();
    let mut runs = 0;
    while runs < requested.unwrap_or(15) && (requested.is_some() || Instant::now() < until) {
        runs += 1;
        let seed = random.below(u64::MAX);
        let mut random = Random::new(seed);
        let folder = Folder::new();
        let busy = format!("busy {}", random.below(400_u64));
        let way = random.below(6_u64);
        let setup: &[&str] = if way == KNOWS_GPUMEM { &["subscribe"] } else { &[] };
        let steps = [setup, &ALLOCATES, &[&busy, "call cuMemAlloc_v2 &last 512"]].concat();
        let plain = Standin::new().dispatch().run(&steps.join("; "));
        let machine = Standin::new().dispatch().limit(Duration::from_secs(120));
        let machine =
            machine.env("XDG_CACHE_HOME", folder.0.path().join("cache")).env("XDG_RUNTIME_DIR", folder.0.path());
        // If other users cannot read the cache of root, the library is in this folder.
        let machine = machine.env("TMPDIR", folder.0.path());
        let ended = AtomicBool::new(false);
        let (outcome, done) = thread::scope(|threads| {
            let disturbs = threads.spawn(|| disturb_until(folder.0.path(), &ended, &mut random));
            if way == DORMANT {
                threads.spawn(|| start(&folder.0.path().join("gpumem"), &ended));
            }
            let ends = EndsAtDrop(&ended);
            let outcome = run_in(&machine, &folder, way, &steps);
            drop(ends);
            (outcome, disturbs.join().expect("it does not panic"))
        });
        let context = || format!("run {runs}, seed {seed}: {done:?}\n{outcome}");
        assert_eq!((outcome.exit(), &outcome.stdout), (plain.exit(), &plain.stdout), "{}", context());
        all = Done {
            truncated: all.truncated + done.truncated,
            removed: all.removed + done.removed,
            replaced: all.replaced + done.replaced,
        };
    }
    println!("{runs} runs: {all:?}");
    assert!(all.truncated > 0 && all.removed > 0 && all.replaced > 0, "{all:?}");
}
