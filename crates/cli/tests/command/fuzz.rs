//! Changes recordings at random: the command takes little time and memory for all of them. The files are the same each time. `fuzz/` makes
//! others.

use std::{fs, time::Duration};

use fastrand::Rng;

use crate::{
    costs::{CASES, made},
    damaged::{HEADER, damage, padded, recording, records},
    file,
    limits::Limits,
    made::{MIB, Made},
};

/// A file has at most this many bytes.
const MOST: usize = 10_000_000;

/// Without optimisation, small recordings take long enough.
const ITEMS: u64 = 2_000;

/// The items that are changed: those of recordings that a session could have written, and of expensive ones.
struct Seeds {
    begin: Vec<u8>,
    all: Vec<Vec<Vec<u8>>>,
}

impl Seeds {
    fn new(random: &mut Rng) -> Self {
        let known_from = Some(Duration::from_micros(60));
        let mut all = vec![
            Made::new("train").training(3, 5, MIB).file(),
            Made::new("train").tensors(3, 10, MIB, None).file(),
            Made::new("train").tensors(5, 4, MIB, known_from).file(),
            Made::new("train").varied(3_000).file(),
        ];
        let begin = all[0][..HEADER].to_vec();
        for _ in 0..3 {
            let case = &CASES[random.usize(..CASES.len())];
            all.push(made(case, 1 + random.u64(..ITEMS)));
        }
        Self { begin, all: all.iter().map(|file| records(file)).collect() }
    }

    fn any<'a>(&'a self, random: &mut Rng) -> &'a [Vec<u8>] {
        &self.all[random.usize(..self.all.len())]
    }

    /// Makes a random recording.
    fn mutated(&self, random: &mut Rng) -> Vec<u8> {
        let mut parts = self.any(random).to_vec();
        for _ in 0..random.usize(..6) {
            let at = random.usize(..parts.len());
            match random.usize(..7) {
                0 => damage(random, &mut parts[at]),
                // A part is repeated. The excess is cut off.
                1 => {
                    let times = 1 << random.usize(..12);
                    let part = parts[at].clone();
                    parts.splice(at..at, std::iter::repeat_n(part, times.min(MOST / parts[at].len().max(1))));
                }
                2 => {
                    let others = self.any(random);
                    let first = random.usize(..others.len());
                    let end = (first + 1 + random.usize(..8)).min(others.len());
                    parts.splice(at..at, others[first..end].iter().cloned());
                }
                3 if parts.len() > 1 => drop(parts.remove(at)),
                4 => {
                    let other = random.usize(..parts.len());
                    parts.swap(at, other);
                }
                // Items of two records are put into one, as far as there is room.
                5 => {
                    let more = parts[random.usize(..parts.len())].clone();
                    if parts[at].len() + more.len() <= 1 << 20 {
                        parts[at].extend(more);
                    }
                }
                _ => {
                    let items = &mut parts[at];
                    let part = items[random.usize(..items.len().max(1)).min(items.len())..].to_vec();
                    while items.len() + part.len() <= 1 << 20 && !part.is_empty() && random.usize(..50) > 0 {
                        items.extend(&part);
                    }
                }
            }
        }
        let mut file = recording(&self.begin, &parts, random.usize(..2) == 0);
        file.truncate(MOST);
        match random.usize(..8) {
            0 => file.truncate(HEADER + random.usize(..=file.len() - HEADER)),
            // The checksums are not correct then.
            1 => damage(random, &mut file),
            2 => file = padded(file, random.usize(..MOST)),
            _ => {}
        }
        file
    }
}

/// Each file is read by each report and each format.
const VIEWS: &str = "report IN|report --json IN|report IN OTHER|report --tree IN|report --json --tree IN|report --calls --min 0% IN|\
                     report --json --calls IN|report --table IN|report --json --table IN|report --leaks IN|\
                     report --json --at peak IN|report --at 1ms IN|report --between start peak IN|report --html OUT IN|\
                     report --format folded -o OUT IN|report --format json -o OUT IN|report --format pprof -o OUT IN|\
                     report --format perfetto -o OUT IN|report --format torch -o OUT IN|\
                     report --format parquet -o FOLDER IN|diff OTHER IN";

fn view<'a>(random: &mut Rng, file: &'a str, other: &'a str, out: &'a str, folder: &'a str) -> Vec<&'a str> {
    let views: Vec<_> = VIEWS.split('|').collect();
    let word = |word: &'static str| match word {
        "IN" => file,
        "OTHER" => other,
        "OUT" => out,
        "FOLDER" => folder,
        word => word,
    };
    views[random.usize(..views.len())].split(' ').map(word).collect()
}

#[test]
fn changed_recordings_cost_little() {
    const SEEDS: u64 = 3;
    const RUNS: u64 = 10;
    let text = |name: &str| file(name).into_os_string().into_string().expect("the name is text");
    let [input, other, out, folder] = ["fuzz.capture", "fuzz-other.capture", "fuzz.out", "fuzz-tables"].map(text);
    fs::write(&other, Made::new("train").training(2, 3, MIB).file()).expect("the file can be written");
    let mut refused = 0;
    for seed in 0..SEEDS {
        let mut random = Rng::with_seed(seed);
        let seeds = Seeds::new(&mut random);
        for run in 0..RUNS {
            fs::write(&input, seeds.mutated(&mut random)).expect("the file can be written");
            let arguments = view(&mut random, &input, &other, &out, &folder);
            let spent = Limits::OF_A_RECORDING.run(&arguments);
            let spent = spent.unwrap_or_else(|why| panic!("seed {seed}, run {run}, in {input}: {why}"));
            refused += u64::from(spent.is_refused);
        }
    }
    _ = fs::remove_dir_all(folder);
    let runs = SEEDS * RUNS;
    assert!((runs / 20..runs).contains(&refused), "{refused} of {runs} refused");
}
