//! Tests that the example in `docs/RECORDING.md` equals the written file.

use std::{fmt::Write as _, fs, io::Cursor, path::Path, time::Duration};

use crate::{CallsiteDefinition, End, Item, Reader, RecordedEvent};
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, StackId, ThreadId,
};

use crate::testing::written;

fn example() -> Vec<Item> {
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let event = |number, micros, kind| {
        let time = Duration::from_micros(micros);
        Item::Event(RecordedEvent { number, ticks: 1_000 * number, time, thread: ThreadId(1), kind })
    };
    let spec = ScopeSpec { callsite: CallsiteId(2), ..ScopeSpec::exact(device) };
    let key = Key::from_raw(0x7000_0000);
    let block = Block { device, bytes: Bytes::mib(1), kind: MemKind::Pool, context: 1, stack: StackId::NONE };
    vec![
        Item::Callsite(CallsiteDefinition {
            id: CallsiteId(2),
            name: Some("step".to_owned()),
            file: "main.rs".to_owned(),
            line: 9,
            column: 5,
            module_path: None,
        }),
        event(1, 3, EventKind::Open { scope: ScopeId(0), spec }),
        event(2, 3, EventKind::Alloc { key, block }),
        event(3, 3, EventKind::Free { key, block: None }),
        event(4, 8, EventKind::Close { scope: ScopeId(0) }),
    ]
}

fn hexdump(file: &[u8]) -> String {
    let mut text = String::new();
    for (at, line) in file.chunks(16).enumerate() {
        let bytes: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let sign = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '.' };
        let signs: String = line.iter().map(sign).collect();
        writeln!(text, "{:04x}  {:<47}  {signs}", 16 * at, bytes.join(" ")).unwrap();
    }
    text
}

#[test]
fn the_document_shows_what_is_written() {
    let file = written(&example());
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("RECORDING.md");
    let document = fs::read_to_string(document).unwrap();
    let dump = hexdump(&file);
    assert!(document.contains(&dump), "the document does not have:\n{dump}");
    let mut reader = Reader::new(Cursor::new(file)).unwrap();
    while reader.step().unwrap().is_some() {}
    assert_eq!((reader.end(), reader.skipped().is_nothing()), (Some(&End::Complete), true));
}
