//! Tests recordings that no session writes. Each is made to cost as much as it can, and still its reports must take little time
//! and memory.

use std::{fs, time::Duration};

use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, EventKind, Family, Key, Label, MemKind, ScopeId, ScopeSpec, StackId, ThreadId,
};
use gpumem_recording::{
    AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvents, BlockLabel, CodeAddress, Item,
    ModuleDefinition, RecordedEvent, StackDefinition, Symbol, SymbolsDefinition, Writer,
};

use crate::{
    damaged::{HEADER, recording, records},
    file,
    limits::Limits,
    recording_builder::{allocator_event, callsite},
};

/// A recording that is being made, with a limit on the number of its items.
struct Costly {
    writer: Writer<Vec<u8>>,
    number: u64,
    most: u64,
}

impl Costly {
    /// Returns whether more items may be added.
    fn has_room(&self) -> bool {
        self.writer.written().items < self.most
    }

    /// Calls `add` with one number after the other until there is no more room.
    fn filled<N>(&mut self, numbers: impl Iterator<Item = N>, mut add: impl FnMut(&mut Self, N)) {
        for number in numbers {
            if !self.has_room() {
                break;
            }
            add(self, number);
        }
    }

    fn item(&mut self, item: &Item) {
        self.writer.write(item).expect("memory takes all");
    }

    fn event(&mut self, kind: EventKind) {
        self.number += 1;
        let (number, thread) = (self.number, ThreadId(1));
        let event = RecordedEvent { number, ticks: number, time: Duration::ZERO, thread, kind };
        self.writer.write_event(&event).expect("memory takes all");
    }

    fn alloc(&mut self, key: u64, bytes: u64, stack: u32) {
        self.event(EventKind::Alloc { key: Key::from_raw(key), block: block(device(0), bytes, stack) });
    }

    fn free(&mut self, key: u64) {
        self.event(EventKind::Free { key: Key::from_raw(key), block: None });
    }

    fn open(&mut self, scope: u64, callsite: u32, at_peak: bool) {
        let spec = ScopeSpec { callsite: CallsiteId(callsite), at_peak, ..ScopeSpec::exact(device(0)) };
        self.event(EventKind::Open { scope: ScopeId(scope), spec });
    }

    fn close(&mut self, scope: u64) {
        self.event(EventKind::Close { scope: ScopeId(scope) });
    }

    fn callsite(&mut self, id: u32, name: &str) {
        self.item(&Item::Callsite(callsite(id, name, "a.rs", id)));
    }

    /// Adds a stack of this number of addresses, each of which stands for this number of functions with names of
    /// `length` bytes.
    fn stack(&mut self, id: u32, addresses: u64, functions: u64, length: usize) {
        let address = |at| CodeAddress { module: 1, offset: u64::from(id) << 32 | at };
        let addresses: Vec<_> = (0..addresses).map(address).collect();
        for address in &addresses {
            let symbol = |at: u64| Symbol {
                function: Some(format!("f{id}_{at}{}", "x".repeat(length))),
                file: Some("/home/ada/a.rs".to_owned()),
                line: Some(1),
                column: None,
            };
            let symbols = (0..functions).map(symbol).collect();
            self.item(&Item::Symbols(SymbolsDefinition { address: *address, symbols }));
        }
        self.item(&Item::Stack(StackDefinition { id: StackId(id), addresses }));
    }
}

fn device(ordinal: u32) -> Device {
    Device { family: Family::Cuda, ordinal }
}

fn block(device: Device, bytes: u64, stack: u32) -> Block {
    Block { device, bytes: Bytes::new(bytes), kind: MemKind::Device, context: 1, stack: StackId(stack) }
}

/// A kind of recording: its name, and the function that adds items as long as there is room.
type Case = (&'static str, fn(&mut Costly));

/// Makes a recording of about this number of items.
fn made((_, add): &Case, most: u64) -> Vec<u8> {
    let writer = Writer::new(Vec::new()).expect("memory takes all");
    let mut made = Costly { writer, number: 0, most };
    add(&mut made);
    let file = made.writer.finish().expect("memory takes all");
    recording(&file[..HEADER], &records(&file))
}

const CASES: [Case; 16] = [
    ("live", |made| {
        made.filled(1.., |made, at| {
            made.alloc(at << 21, 1 << 20, 0);
        });
    }),
    ("churn of many", |made| {
        made.filled(1.., |made, at| {
            made.alloc((at * 7919 % 40_000) << 21, at % 1000, 0);
            if at > 20_000 {
                made.free(((at - 20_000) * 7919 % 40_000) << 21);
            }
        });
    }),
    ("shrinking", |made| {
        made.alloc(1 << 21, 1 << 40, 0);
        made.filled(1.., |made, at| {
            made.event(EventKind::Shrink { key: Key::from_raw(1 << 21), bytes: Bytes::new((1 << 40) - at) });
        });
    }),
    ("losses", |made| {
        made.filled(1.., |made, at| {
            made.alloc(at << 21, 1, 0);
            made.event(EventKind::Lost { count: 1 });
        });
    }),
    ("refusals", |made| {
        for _ in 0..20_000 {
            let (bytes, kind, stack) = (Bytes::new(1 << 40), MemKind::Device, StackId(1));
            made.event(EventKind::Rejected { device: Some(device(0)), bytes, kind, stack });
        }
        while made.has_room() {
            made.alloc(1 << 21, 1 << 20, 0);
            made.free(1 << 21);
        }
    }),
    ("deep scopes", |made| {
        (2..66).for_each(|id| made.callsite(id, &"x".repeat(16_000)));
        let mut scope = 0;
        while made.has_room() {
            let path = scope;
            for depth in 0..60 {
                made.open(
                    path + depth,
                    2 + u32::try_from((path / 60 + depth * depth) % 64).expect("it is small"),
                    false,
                );
            }
            made.alloc(scope << 21, 1 << 20, 0);
            (0..60).rev().for_each(|depth| made.close(path + depth));
            scope += 60;
        }
    }),
    ("open scopes", |made| {
        made.filled(0.., |made, scope| {
            made.open(scope, 2, true);
            made.alloc((scope + 1) << 21, 1 << 20, 0);
        });
    }),
    ("overlapping scopes", |made| {
        made.filled(0.., |made, scope| {
            made.open(scope, 2, false);
            if scope > 10_000 {
                made.close(scope - 10_000);
            }
        });
    }),
    ("kept peaks", |made| {
        for at in 1..2_000 {
            made.alloc(at << 21, 1, u32::try_from(at).expect("it is small"));
        }
        made.filled(0.., |made, scope| {
            made.open(scope, 2, true);
            made.alloc((scope % 2_000 + 10_000) << 21, 1 << 20, u32::try_from(scope % 2_000).expect("it is small"));
            made.free((scope % 2_000 + 10_000) << 21);
            made.close(scope);
        });
    }),
    ("groups of named scopes", |made| {
        (2..5_000).for_each(|id| made.callsite(id, &format!("scope {id}")));
        (1..200).for_each(|id| made.stack(id, 20, 1, 40));
        made.filled(0_u32.., |made, scope| {
            made.open(scope.into(), 2 + scope % 4_998, false);
            made.alloc(u64::from(scope + 1) << 21, 1 << 20, 1 + scope % 199);
            made.close(scope.into());
        });
    }),
    ("names of many modules", |made| {
        let modules = "a::".repeat(5_000);
        for scope in 0_u32..200 {
            made.callsite(2 + scope, &format!("{modules}f{scope}::{{{{closure}}}}"));
            made.open(scope.into(), 2 + scope, false);
            made.alloc(u64::from(scope + 1) << 21, 1 << 20, 0);
            made.close(scope.into());
        }
    }),
    ("devices", |made| {
        made.filled(1.., |made, at| {
            let device = device(u32::try_from(at % 256).expect("it is small"));
            made.event(EventKind::Alloc { key: Key::from_raw(at << 21), block: block(device, at, 0) });
        });
    }),
    ("long stacks", |made| {
        made.item(&Item::Module(ModuleDefinition { id: 1, path: "/a".to_owned(), build_id: vec![], base: 0 }));
        (1..20).for_each(|id| made.stack(id, 100, 60, 100));
        made.filled(1.., |made, at| {
            let stack = 100 + u32::try_from(at).expect("it is small");
            if at < 1_000 {
                let address = |offset: u64| CodeAddress { module: 1, offset: ((1 + at % 19) << 32) | (offset % 100) };
                let addresses = (0..1_000).map(address).collect();
                made.item(&Item::Stack(StackDefinition { id: StackId(stack), addresses }));
            }
            made.alloc(at << 21, 1 << 20, 100 + u32::try_from(at % 1_000).expect("it is small"));
        });
    }),
    ("labels", |made| {
        made.filled(1.., |made, at| {
            made.alloc(at << 21, 1 << 20, 0);
            let label = Label { name: "x".repeat(900), shape: vec![1; 40], dtype: String::new() };
            made.item(&Item::Label(BlockLabel { key: Key::from_raw(at << 21), number: made.number, label }));
        });
    }),
    ("allocator", |made| allocator(made, |at| (AllocatorAction::Alloc, at * 512, 512))),
    ("allocator's segments", |made| {
        allocator(made, |at| {
            let action = if at % 2 == 0 { AllocatorAction::SegmentAlloc } else { AllocatorAction::Alloc };
            (action, at * 512, if at % 2 == 0 { 1 << 40 } else { 512 })
        });
    }),
];

/// An event of the allocator: its action, the address, and the bytes.
type Step<'a> = &'a dyn Fn(u64) -> (AllocatorAction, u64, u64);

fn allocator_events(made: &mut Costly, ordinal: u32, first: u64, step: Step<'_>) {
    let event = |at: u64| {
        let (action, address, bytes) = step(at);
        allocator_event(Duration::from_nanos(at), action, address, bytes, 0)
    };
    let events = (first..first + AllocatorEvents::MOST as u64).map(event).collect();
    made.item(&Item::AllocatorEvents(AllocatorEvents { device: device(ordinal), events }));
}

fn allocator(made: &mut Costly, step: impl Fn(u64) -> (AllocatorAction, u64, u64)) {
    let devices = vec![AllocatorDevice { device: device(0), older: 0, known_from: None, reported: None }];
    made.item(&Item::Allocator(AllocatorDefinition {
        name: "PyTorch".to_owned(),
        devices,
        ..AllocatorDefinition::default()
    }));
    let mut first = 0;
    while first < made.most {
        allocator_events(made, 0, first, &step);
        first += AllocatorEvents::MOST as u64;
    }
}

/// Outputs for which the command processes a recording in different ways. Each case above is tested with one of them.
const OUTPUTS: [&[&str]; 5] = [
    &["report"],
    &["report", "--json", "--table"],
    &["report", "--html"],
    &["report", "--format", "torch", "-o"],
    &["report", "--format", "parquet", "-o"],
];

#[test]
fn no_recording_costs_much() {
    for (at, case) in CASES.iter().enumerate() {
        let out = file(&format!("costs-{at}.out")).into_os_string().into_string().expect("the name is text");
        let path = file(&format!("costs-{at}.capture"));
        fs::write(&path, made(case, 20_000)).expect("the file can be written");
        let path = path.to_str().expect("the name is text");
        let output = OUTPUTS[at % OUTPUTS.len()];
        let out = matches!(output.last(), Some(&"--html" | &"-o")).then_some(&*out);
        let arguments: Vec<_> = output.iter().copied().chain(out).chain([path]).collect();
        let spent = Limits::OF_A_RECORDING.run(&arguments).unwrap_or_else(|why| panic!("{}: {why}", case.0));
        // Only scopes that stay open for so long need more work than the size of their file allows.
        assert_eq!(spent.is_rejected, case.0 == "overlapping scopes", "{}: {spent:?}", case.0);
        println!("{}: {spent:?}", case.0);
    }
}

/// A short file may describe many layers, and in a recording every second step of the allocator may be a failed allocation.
#[test]
fn no_question_costs_much() {
    let layers = r#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64,
        "num_hidden_layers": 400, "vocab_size": 256}"#;
    let model = file("costs-layers.json");
    fs::write(&model, layers).expect("the file can be written");
    let rejections: Case = ("refusals of the allocator", |made| {
        allocator(made, |at| match at % 2 {
            0 => (AllocatorAction::Alloc, at * 512, 512),
            _ => (AllocatorAction::OutOfMemory, 0, 1 << 30),
        });
    });
    let recording = file("costs-refusals.capture");
    fs::write(&recording, made(&rejections, 400_000)).expect("the file can be written");
    let [model, recording] = [&model, &recording].map(|path| path.to_str().expect("the name is text"));
    for question in [&["estimate", model, "--train", "adam", "--fit", "80GiB"][..], &["what-if", recording]] {
        let spent = Limits::OF_A_RECORDING.run(question).unwrap_or_else(|why| panic!("{why}"));
        println!("{question:?}: {spent:?}");
    }
}

/// The names of scopes are long in this recording, and each slice of a call and each row contains one.
#[test]
fn no_output_is_without_end() {
    let path = file("costs-scopes.capture");
    let case = CASES.iter().find(|(name, _)| *name == "deep scopes").expect("it is there");
    fs::write(&path, made(case, 100_000)).expect("the file can be written");
    let path = path.to_str().expect("the name is text");
    for format in ["perfetto", "parquet"] {
        let out = file(&format!("costs-scopes.{format}"));
        let spent = Limits::OF_A_RECORDING.run(&["report", "--format", format, "-o", out.to_str().unwrap(), path]);
        assert!(spent.as_ref().is_ok_and(|spent| spent.is_rejected), "{format}: {spent:?}");
        let written = fs::metadata(&out).map_or(0, |file| file.len());
        assert!(written < 300_000_000, "{format}: {written} bytes");
    }
}
