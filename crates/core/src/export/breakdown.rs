//! Writes the report `Breakdown`: the parts of a device's used memory.

use std::fmt;

use super::{
    paint::{Paint, Role, Show},
    part_table::table,
    table::shortened,
    tree::{Leaf, Row, Tree},
};
use crate::report::{Breakdown, Part, PartKind, SharedNames};

/// The largest number of rows for scopes, libraries and other parts of this process.
const MOST: usize = 20;

/// Writes a tree, with the largest parts first. A row shows the sum of its inner rows and its own memory.
impl Show for Breakdown {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let Self { device, name, memory, .. } = self;
        let (used, total, free) = (memory.used, memory.total, memory.free);
        let text = format!(": {used} of {total} in use, {free} free");
        let room = paint.width().saturating_sub(format!("device {device} ()").len() + text.len());
        let name = name.as_ref().map(|name| format!(" ({})", shortened(name, room.max(8)))).unwrap_or_default();
        write!(f, "{}", paint.on(Role::Heading, format_args!("device {device}{name}{text}")))?;
        let rows = self.rows();
        if rows.is_empty() {
            return Ok(());
        }
        f.write_str("\n")?;
        table("where", &rows).show(f, paint)
    }
}

impl Breakdown {
    fn rows(&self) -> Vec<Row> {
        let is_of_others = |part: &&Part| matches!(part.kind, PartKind::Others | PartKind::Unknown);
        let names = SharedNames::of(self.parts.iter().map(|part| &*part.path));
        let mut own = Tree::new();
        for Part { kind, name, path, bytes, count } in self.parts.iter().filter(|part| !is_of_others(part)) {
            let bytes = bytes.signed();
            if *kind == PartKind::Scope && !path.is_empty() {
                own.scope(&names.path(path), bytes, *count);
            } else {
                own.leaf(&[], Leaf { name: name.clone(), bytes, blocks: *count, note: None });
            }
        }
        let own = own.rows(MOST);
        let outermost = || own.iter().filter(|row| row.depth == 0);
        let this = Row {
            depth: 0,
            name: "this process".to_owned(),
            bytes: outermost().map(|row| row.bytes).sum(),
            blocks: outermost().map(|row| row.blocks).sum(),
            ..Row::default()
        };
        let inside = own.into_iter().map(|row| Row { depth: row.depth + 1, ..row });
        let own: Vec<_> = if this.bytes > 0 { [this].into_iter().chain(inside).collect() } else { Vec::new() };
        let others = self.parts.iter().filter(is_of_others).map(|part| {
            let name = if part.count > 1 { format!("{} {}", part.count, part.name) } else { part.name.clone() };
            vec![Row { name, bytes: part.bytes.signed(), ..Row::default() }]
        });
        let mut all: Vec<_> = others.chain([own]).filter(|rows| !rows.is_empty()).collect();
        all.sort_by_key(|rows| std::cmp::Reverse(rows[0].bytes));
        all.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Bytes, Device, Family, GpuMemory, GpuProcess, ProcessKind},
        report::{DeviceReading, Group},
    };

    fn group(path: &[&str], library: Option<&str>, blocks: u64, mib: u64) -> Group {
        Group {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            library: library.map(str::to_owned),
            place: None,
            caller: None,
            blocks,
            bytes: Bytes::mib(mib),
            is_cache: false,
        }
    }

    fn process(pid: u32, mib: Option<u64>) -> GpuProcess {
        GpuProcess { pid, name: None, used: mib.map(Bytes::mib), kind: ProcessKind::Compute }
    }

    const OWN_PID: u32 = 7;

    fn reading() -> DeviceReading {
        DeviceReading {
            device: Device { family: Family::Cuda, ordinal: 0 },
            name: Some("NVIDIA H200".to_owned()),
            memory: GpuMemory { total: Bytes::gib(16), free: Bytes::gib(14), used: Bytes::gib(2), reserved: None },
            processes: Some(vec![process(1, Some(900)), process(2, Some(100)), process(OWN_PID, Some(1000))]),
            pool: None,
            taken: Vec::new(),
            driver_gauge: None,
        }
    }

    fn live() -> [Group; 4] {
        [
            group(&["train", "forward"], None, 3, 100),
            group(&[], Some("cuBLAS"), 1, 32),
            group(&["train", "forward"], None, 1, 28),
            group(&[], None, 2, 8),
        ]
    }

    #[test]
    fn parts_stand_in_a_tree() {
        let text = Breakdown::of(&reading(), OWN_PID, &live()).to_string();
        assert_eq!(
            text,
            "\
device 0 (NVIDIA H200): 2 GiB of 16 GiB in use, 14 GiB free
 where                                               MiB  blocks
 ─────────────────────────────────────────────────────────────────────────
 2 other processes                                  1000          ████████
 this process                                       1000       7  ████████
   CUDA context, kernels, modules; what is unknown   832          ██████▋
   train                                             128       4  █
     forward                                         128       4  █
   cuBLAS                                             32       1  ▎
   outside of all scopes                               8       2  ▏
 the driver's, of no process                          48          ▍",
            "\n{text}\n"
        );
        assert!(text.lines().all(|line| line.chars().count() <= 80), "\n{text}\n");
    }

    #[test]
    fn parts_add_up_to_what_is_used() {
        let sum = |breakdown: &Breakdown| breakdown.parts.iter().map(|part| part.bytes).sum::<Bytes>();
        let of = |reading: &DeviceReading| Breakdown::of(reading, OWN_PID, &live());
        let memory = reading().memory;
        assert_eq!(sum(&of(&reading())), memory.used);
        // Values that the driver does not report are not shown.
        for processes in [
            None,
            Some(vec![]),
            Some(vec![process(OWN_PID, None)]),
            Some(vec![process(1, None), process(OWN_PID, Some(1000))]),
        ] {
            let breakdown = of(&DeviceReading { processes, ..reading() });
            assert_eq!(sum(&breakdown), memory.used);
            assert!(breakdown.parts.iter().all(|part| part.kind != PartKind::Others), "{breakdown}");
        }
        // Readings from different moments may add up to more than the memory of the device.
        let less = GpuMemory { used: Bytes::mib(1010), ..memory };
        assert_eq!(sum(&of(&DeviceReading { memory: less, ..reading() })), less.used);
    }

    #[test]
    fn the_smallest_of_many_scopes_are_summed_up() {
        // Names that differ only in numbers would share a row.
        let name = |mib: u32| format!("scope {}", char::from_u32(0x100 + mib).expect("it is a letter"));
        let live: Vec<_> = (1..=100).map(|mib| group(&[&name(mib)], None, 1, mib.into())).collect();
        let memory = GpuMemory { used: Bytes::gib(6), ..reading().memory };
        let reading = DeviceReading { memory, processes: None, ..reading() };
        let text = Breakdown::of(&reading, OWN_PID, &live).to_string();
        assert_eq!(text.lines().filter(|line| line.starts_with("   scope ")).count(), MOST, "{text}");
        assert!(
            text.contains(&format!("   {}  ", name(100))) && !text.contains(&format!("   {}  ", name(80))),
            "{text}"
        );
        assert!(text.contains("   (80 more scopes)  ") && text.contains("  3240      80  "), "{text}");
    }
}
