//! Changes recordings at random, with correct checksums: the command takes little time and memory for all of them. The files are the
//! same each time. `GPUMEM_FUZZ_SECONDS` makes others for this time, from a seed of the clock: `GPUMEM_FUZZ_SECONDS=3600 cargo test
//! --release -p gpumem-cli --test command fuzz -- --nocapture`.

use std::{
    env, fs,
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    costs::{CASES, made},
    damaged::{HEADER, Random, padded, recording, records},
    file,
    limits::{Limits, Spent},
    made::{MIB, Made},
};

/// A file has at most this many bytes.
const MOST: usize = 10_000_000;

/// The items that are changed: those of recordings that a session could have written, and of expensive ones.
struct Seeds {
    begin: Vec<u8>,
    all: Vec<Vec<Vec<u8>>>,
}

impl Seeds {
    fn new(random: &mut Random, items: u64) -> Self {
        let known_from = Some(Duration::from_micros(60));
        let mut all = vec![
            Made::new("train").training(3, 5, MIB).file(),
            Made::new("train").tensors(3, 10, MIB, None).file(),
            Made::new("train").tensors(5, 4, MIB, known_from).file(),
            Made::new("train").varied(3_000).file(),
        ];
        let begin = all[0][..HEADER].to_vec();
        for _ in 0..3 {
            let case = &CASES[random.below(CASES.len())];
            all.push(made(case, 1 + random.below(usize::try_from(items).expect("it fits")) as u64));
        }
        Self { begin, all: all.iter().map(|file| records(file)).collect() }
    }

    fn any<'a>(&'a self, random: &mut Random) -> &'a [Vec<u8>] {
        &self.all[random.below(self.all.len())]
    }

    /// Makes a random recording.
    fn mutated(&self, random: &mut Random) -> Vec<u8> {
        let mut parts = self.any(random).to_vec();
        for _ in 0..random.below(6) {
            let at = random.below(parts.len());
            match random.below(7) {
                0 => random.damage(&mut parts[at]),
                // A part is repeated. The excess is cut off.
                1 => {
                    let times = 1 << random.below(12);
                    let part = parts[at].clone();
                    parts.splice(at..at, std::iter::repeat_n(part, times.min(MOST / parts[at].len().max(1))));
                }
                2 => {
                    let others = self.any(random);
                    let first = random.below(others.len());
                    let end = (first + 1 + random.below(8)).min(others.len());
                    parts.splice(at..at, others[first..end].iter().cloned());
                }
                3 if parts.len() > 1 => drop(parts.remove(at)),
                4 => {
                    let other = random.below(parts.len());
                    parts.swap(at, other);
                }
                // Items of two records are put into one, as far as there is room.
                5 => {
                    let more = parts[random.below(parts.len())].clone();
                    if parts[at].len() + more.len() <= 1 << 20 {
                        parts[at].extend(more);
                    }
                }
                _ => {
                    let items = &mut parts[at];
                    let part = items[random.below(items.len().max(1)).min(items.len())..].to_vec();
                    while items.len() + part.len() <= 1 << 20 && !part.is_empty() && random.below(50) > 0 {
                        items.extend(&part);
                    }
                }
            }
        }
        let mut file = recording(&self.begin, &parts, random.below(2) == 0);
        file.truncate(MOST);
        match random.below(8) {
            0 => file.truncate(HEADER + random.below(file.len() - HEADER + 1)),
            1 => file = padded(file, random.below(MOST)),
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
                     report --format speedscope -o OUT IN|report --format dhat -o OUT IN|\
                     report --format perfetto -o OUT IN|report --format torch -o OUT IN|\
                     report --format rmm-csv -o OUT IN|report --format parquet -o FOLDER IN|diff OTHER IN";

fn view<'a>(random: &mut Random, file: &'a str, other: &'a str, out: &'a str, folder: &'a str) -> Vec<&'a str> {
    let views: Vec<_> = VIEWS.split('|').collect();
    let word = |word: &'static str| match word {
        "IN" => file,
        "OTHER" => other,
        "OUT" => out,
        "FOLDER" => folder,
        word => word,
    };
    views[random.below(views.len())].split(' ').map(word).collect()
}

#[test]
fn changed_recordings_cost_little() {
    let seconds: Option<u64> = env::var("GPUMEM_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is later").as_secs();
    let first = if seconds.is_some() { clock() << 20 } else { 0 };
    let text = |name: &str| file(name).into_os_string().into_string().expect("the name is text");
    let [input, other, out, folder] = ["fuzz.capture", "fuzz-other.capture", "fuzz.out", "fuzz-tables"].map(text);
    fs::write(&other, Made::new("train").training(2, 3, MIB).file()).expect("the file can be written");
    let (mut runs, mut refused, mut failed, mut most) = (0_u64, 0, 0, Spent::default());
    let mut said = Instant::now();
    while until.map_or(runs < 20, |until| Instant::now() < until) {
        let seed = first + runs;
        let mut random = Random(seed);
        // Without optimisation, even small files take long.
        let items = if seconds.is_some() { 1 << (8 + random.below(14)) } else { 2_000 };
        let seeds = Seeds::new(&mut random, items);
        for _ in 0..if seconds.is_some() { 20 } else { 5 } {
            fs::write(&input, seeds.mutated(&mut random)).expect("the file can be written");
            let arguments = view(&mut random, &input, &other, &out, &folder);
            runs += 1;
            match Limits::OF_A_RECORDING.run(&arguments) {
                Ok(spent) => {
                    refused += u64::from(spent.is_refused);
                    most.megabytes = most.megabytes.max(spent.megabytes);
                    most.ticks = most.ticks.max(spent.ticks);
                }
                Err(why) => {
                    failed += 1;
                    let kept = format!("{input}.failed-{seed}-{runs}");
                    fs::copy(&input, &kept).expect("the file can be kept");
                    println!("FAILED, kept as {kept}: {why}");
                    assert!(seconds.is_some(), "{kept}: {why}");
                }
            }
        }
        if seconds.is_some() && said.elapsed() > Duration::from_secs(60) {
            said = Instant::now();
            println!("{runs} runs, {refused} refused, {failed} failed, the most: {most:?}");
        }
    }
    _ = fs::remove_dir_all(Path::new(&folder));
    println!("{runs} runs, {refused} refused, {failed} failed, the most: {most:?}");
    assert!(failed == 0 && refused > runs / 20 && refused < runs, "{failed} failed, {refused} of {runs} refused");
}
