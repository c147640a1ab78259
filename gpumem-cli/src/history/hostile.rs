//! Recordings that no session writes: all reports and formats of them end, without a panic.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem_core::{
    export::Paint,
    model::{
        Block, Bytes, CallsiteId, Device, EventKind, Family, GpuMemory, Key, MemKind, ScopeId, ScopeSpec, StackId,
        ThreadId,
    },
    recording::{
        AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents, AllocatorFigures,
        CallsiteDefinition, ClockPair, CodeAddress, DeviceDefinition, Item, ModuleDefinition, Process, RecordedEvent,
        StackDefinition, Symbol, SymbolsDefinition, Writer,
    },
};

use super::{BlockLife, History, Moment};
use crate::{
    formats::Format,
    made::Random,
    page::Page,
    report::{json, moment, overview::Overview, places, summary, tensors},
    what_if,
};

impl Random {
    /// A number that is small mostly, and sometimes among the largest.
    fn any(&mut self) -> u64 {
        match self.below(8) {
            0 => u64::MAX - self.below(3),
            1 => 1 << self.below(64),
            _ => self.below(1000),
        }
    }

    fn small(&mut self) -> u32 {
        u32::try_from(self.any() & 0xffff_ffff).expect("it has 32 bits")
    }

    fn text(&mut self) -> String {
        const TEXTS: [&str; 6] = ["", "a;b", "</script>", "\u{1b}[31m\n", "src/train.py", "λ \"quoted\" \\"];
        TEXTS[usize::try_from(self.below(6)).expect("it is small")].to_owned()
    }

    fn device(&mut self) -> Device {
        let family = if self.below(2) == 0 { Family::Cuda } else { Family::Simulated };
        Device { family, ordinal: u32::try_from(self.below(4)).expect("it is small") }
    }

    fn memory(&mut self) -> GpuMemory {
        let [total, free, used] = [(); 3].map(|()| Bytes::new(self.any()));
        GpuMemory::new(total, free, used, None)
    }

    fn event(&mut self) -> EventKind {
        let key = Key::from_raw(self.below(40) << 20 | self.below(3) << 58);
        let scope = ScopeId(self.below(12));
        match self.below(14) {
            0..5 => {
                let kind = MemKind::ALL[usize::try_from(self.below(6)).expect("it is small")];
                let context = u8::try_from(self.below(4)).expect("it is small");
                let stack = StackId(u32::try_from(self.below(8)).expect("it is small"));
                let bytes = Bytes::new(self.any());
                EventKind::Alloc { key, block: Block { device: self.device(), bytes, kind, context, stack } }
            }
            5..8 => EventKind::Free { key, block: None },
            8 => EventKind::FreeFailed,
            9 => EventKind::Shrink { key, bytes: Bytes::new(self.any()) },
            10 => EventKind::ContextDestroyed { context: 1 },
            11 => {
                let exact = ScopeSpec::exact(self.device());
                let callsite = CallsiteId(self.small() % 6);
                let spec = ScopeSpec { callsite, at_peak: self.below(2) == 0, ..exact };
                EventKind::Open { scope, spec }
            }
            12 => EventKind::Close { scope },
            _ => match self.below(5) {
                3 => EventKind::Mark { callsite: CallsiteId(self.small() % 6) },
                4 => EventKind::OnStream { frees: self.below(2) == 0, stream: self.small() },
                1 => EventKind::Refused {
                    device: Some(self.device()).filter(|_| self.below(2) == 0),
                    bytes: Bytes::new(self.any()),
                    kind: MemKind::ALL[usize::try_from(self.below(6)).expect("it is small")],
                    stack: StackId(self.small() % 8),
                },
                0 => EventKind::Sample { device: self.device(), memory: self.memory() },
                _ => EventKind::Lost { count: self.any() },
            },
        }
    }

    fn definition(&mut self) -> Item {
        let number = self.small() % 8;
        let address = CodeAddress { module: self.small() % 4, offset: self.any() % 6 };
        match self.below(12) {
            0 => Item::Process(Process {
                pid: self.small(),
                executable: self.text(),
                arguments: vec![self.text(); 2],
                folder: self.text(),
                own_module: Some(self.text()),
                began: Duration::from_nanos(self.any()),
                version: self.text(),
                ran_before: Some(Duration::from_nanos(self.any())),
                cards: Some(self.text()),
            }),
            1 => Item::Clock(ClockPair { ticks: self.any(), time: Duration::from_nanos(self.any()) }),
            2 => Item::Callsite(CallsiteDefinition {
                id: CallsiteId(number),
                name: Some(self.text()),
                file: self.text(),
                line: self.small(),
                column: 1,
                module_path: None,
            }),
            3 => Item::Module(ModuleDefinition { id: number, path: self.text(), build_id: vec![], base: self.any() }),
            4 => Item::Stack(StackDefinition { id: StackId(number), addresses: vec![address; 3] }),
            5 => {
                let symbol = Symbol {
                    function: Some(self.text()),
                    file: Some(self.text()),
                    line: Some(self.small()),
                    column: None,
                };
                Item::Symbols(SymbolsDefinition { address, symbols: vec![symbol; 2] })
            }
            6 => Item::Device(DeviceDefinition {
                device: self.device(),
                name: Some(self.text()),
                total: Some(Bytes::new(self.any())),
                uuid: None,
            }),
            7 => {
                let device = AllocatorDevice {
                    device: self.device(),
                    older: self.below(9),
                    known_from: Some(Duration::from_nanos(self.any())),
                    said: Some(AllocatorFigures { allocated: Bytes::new(self.any()), ..AllocatorFigures::default() }),
                };
                let missing = (self.below(2) == 0).then(|| self.text());
                Item::Allocator(AllocatorDefinition {
                    name: self.text(),
                    missing,
                    devices: vec![device; 2],
                    ..AllocatorDefinition::default()
                })
            }
            _ => {
                let events = (0..50).map(|_| self.allocator_event()).collect();
                Item::AllocatorEvents(AllocatorEvents { device: self.device(), events })
            }
        }
    }

    fn allocator_event(&mut self) -> AllocatorEvent {
        let actions = [
            AllocatorAction::SegmentAlloc,
            AllocatorAction::SegmentFree,
            AllocatorAction::Alloc,
            AllocatorAction::FreeRequested,
            AllocatorAction::FreeCompleted,
            AllocatorAction::OutOfMemory,
        ];
        let is_large = self.below(20) == 0;
        let [bytes, requested] =
            [(); 2].map(|()| Bytes::new(if is_large { self.any() & ((1 << 46) - 1) } else { self.below(1 << 22) }));
        AllocatorEvent {
            time: Duration::from_nanos(self.any() >> (self.0 & 63)),
            action: actions[usize::try_from(self.below(6)).expect("it is small")],
            address: self.below(30) << 20,
            bytes,
            requested,
            stream: self.any(),
            stack: StackId(u32::try_from(self.below(8)).expect("it is small")),
            group: u32::try_from(self.below(8)).expect("it is small"),
        }
    }
}

fn recording(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut writer = Writer::new(Vec::new()).expect("memory takes all");
    let (mut number, mut time) = (0_u64, 0_u64);
    for _ in 0..400 {
        if random.below(4) == 0 {
            writer.write(&random.definition()).expect("memory takes all");
            continue;
        }
        number = number.saturating_add(1 + random.below(2));
        time = if random.below(100) == 0 { random.any() } else { time.saturating_add(random.below(1000)) };
        let event = RecordedEvent {
            number,
            ticks: random.any(),
            time: Duration::from_nanos(time),
            thread: ThreadId(u32::try_from(random.below(5)).expect("it is small")),
            kind: random.event(),
        };
        writer.write_event(&event).expect("memory takes all");
    }
    writer.finish().expect("memory takes all")
}

#[test]
fn all_reports_and_formats_of_hostile_recordings_end() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/tmp");
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join(format!("hostile-{}.capture", std::process::id()));
    let (mut changes, mut tensors) = (0, 0);
    for seed in 0..40 {
        fs::write(&file, recording(seed)).unwrap();
        let mut history = History::read(&file).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        changes += history.lives.change_count();
        let devices = history.tensors.iter().flat_map(|tensors| &tensors.devices);
        tensors += devices.filter(|device| device.live.peak_at.is_some()).count();
        assert_peaks_of_tensors(&history);
        everything(&mut history, &folder);
    }
    fs::remove_file(file).unwrap();
    assert!(changes > 2_000, "{changes}: most is not left out");
    assert!(tensors > 20, "{tensors}: most is not left out");
}

/// The blocks that the page shows add up to the peak of the summary.
fn assert_peaks_of_tensors(history: &History) {
    let Some(tensors) = &history.tensors else { return };
    let all = &tensors.blocks;
    for (number, device) in (0_u16..).zip(&tensors.devices) {
        let (Some(at), Some(steps)) = (device.live.peak_at, device.peak_steps()) else { continue };
        let is_tensor = |block: &BlockLife| block.device == number && block.origin != all.segment_origin;
        let live = all.lives.blocks().map(|(_, block)| block).filter(is_tensor).filter(|block| block.is_live_after(at));
        assert_eq!(live.map(|block| block.bytes).sum::<u64>(), device.live.peak);
        assert_eq!(device.allocated[steps - 1], device.live.peak);
    }
}

fn everything(history: &mut History, folder: &Path) {
    let mut out = io::sink();
    let overview = Overview::of(history);
    json::write(&overview, &mut out).unwrap();
    summary::write_all(std::slice::from_ref(&overview), &mut out, Paint::ANSI).unwrap();
    summary::write_all(&[overview.clone(), overview], &mut out, Paint::PLAIN).unwrap();
    places::write(history, &mut out, Paint::PLAIN).unwrap();
    if let Ok(answer) = what_if::ask_recording(history, Bytes::gib(80), 1) {
        answer.write(&mut out, Paint::PLAIN).unwrap();
    }
    for at in [Moment::Start, Moment::Peak, Moment::End, Moment::Oom, Moment::Time(Duration::from_nanos(500))] {
        moment::write_at(history, at, &mut out, Paint::PLAIN).unwrap();
        tensors::write_at(history, at, true, &mut out, Paint::PLAIN).unwrap();
        moment::write_between(history, [Moment::Peak, at], &mut out, Paint::PLAIN).unwrap();
        for format in [Format::Folded, Format::Pprof, Format::Speedscope] {
            format.write(history, at, true, &mut out).unwrap();
        }
    }
    for format in [Format::Json, Format::Dhat, Format::Perfetto, Format::Torch, Format::RmmCsv] {
        format.write(history, Moment::Peak, false, &mut out).unwrap();
    }
    let mut page = Page::default();
    page.add(history).unwrap();
    page.write(&mut out).unwrap();
    #[cfg(feature = "parquet")]
    crate::formats::parquet::write(history, &folder.join("hostile")).unwrap();
    #[cfg(not(feature = "parquet"))]
    let _ = folder;
}
