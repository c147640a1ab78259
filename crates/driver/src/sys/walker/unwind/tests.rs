//! Tests tables that compilers wrote, damaged tables, and tables that the tests write.

use std::sync::Arc;

use super::{
    super::{
        modules::Module,
        tables::{Tables, memory},
    },
    *,
};

/// Returns an address at the start and one in the middle of each function of a module.
fn addresses(module: &Module) -> Vec<u64> {
    // SAFETY: the modules of these tests are not unloaded.
    let tables = unsafe { Tables::of(module) }.unwrap();
    let table = tables.index.table().unwrap();
    let mut functions = table.iter(&tables.bases);
    let mut addresses = Vec::new();
    while let Ok(Some((start, _))) = functions.next() {
        let start = start.direct().unwrap();
        let length = tables.entry(start).map_or(0, |entry| entry.len());
        addresses.extend([start, start + length / 2]);
    }
    addresses
}

fn module_of(address: u64) -> (Arc<Modules>, Module) {
    let modules = Modules::current(None, |_| false).expect("the loader counts");
    let module = modules.of(address).expect("it is loaded").clone();
    (modules, module)
}

#[test]
fn all_tables_of_compilers_are_supported() {
    let mut context = UnwindContext::new_in();
    for address in [addresses as *const () as usize, libc::qsort as *const () as usize] {
        let (_modules, module) = module_of(address as u64);
        let addresses = addresses(&module);
        // SAFETY: as in `addresses`.
        let has_rule = |address: &&u64| unsafe { rule_for(&module, **address, &mut context) }.is_some();
        let count = addresses.iter().filter(has_rule).count();
        assert!(count > 2000 && count * 1000 > addresses.len() * 998, "{count} of {}", addresses.len());
    }
}

/// With damaged tables, the walk may fail, but it reads no other memory and does not panic.
#[test]
fn damaged_tables_are_safe() {
    let (modules, _) = module_of(addresses as *const () as u64);
    let size = |module: &&Module| module.readable_up_to(module.index.start).unwrap() - module.index.start;
    let smallest = modules.all().iter().min_by_key(size).expect("there are some");
    let addresses = addresses(smallest);
    let (from, to) = (smallest.index.start, smallest.readable_up_to(smallest.index.start).unwrap());
    // SAFETY: the module is loaded, and is not unloaded.
    let sound = unsafe { memory(from..to) };
    let mut context = UnwindContext::new_in();
    let mut seed = 1_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (seed >> 33) as usize % below
    };
    let mut broken = 0;
    for round in 0..3000 {
        let mut bytes = sound.to_vec();
        // The offsets in the copy are relative to the copy.
        let moved = (bytes.as_ptr().addr() as u64).wrapping_sub(from);
        for _ in 0..round.min(1 + random(4)) {
            let at = random(bytes.len());
            bytes[at] = random(256).to_le_bytes()[0];
        }
        if round % 4 == 3 {
            bytes.truncate(random(sound.len()));
        }
        let copied = bytes.as_ptr().addr() as u64;
        let length = bytes.len() as u64;
        let index = copied..copied + (smallest.index.end - from).min(length);
        let module = Module::with(smallest.code.clone(), index, copied..copied + length);
        // SAFETY: the module is the copy, which lives.
        let has_rule =
            |address: &&u64| unsafe { rule_for(&module, address.wrapping_add(moved), &mut context) }.is_some();
        let count = addresses.iter().filter(has_rule).count();
        assert!(round > 0 || count == addresses.len(), "{count} of {}", addresses.len());
        broken += usize::from(count < addresses.len());
    }
    assert!(broken > 100, "{broken} were broken");
}

/// A function in a table of the tests: its end, relative to the start of the first function, and its instructions.
type Function<'a> = (u64, &'a [u8]);

/// Tables as a linker writes them (`.eh_frame_hdr`, then `.eh_frame`), for adjacent functions, and the address of the first one.
#[cfg(target_arch = "x86_64")]
fn linked(functions: &[Function<'_>]) -> (Vec<u8>, Module, u64) {
    // The tables have version 1, no augmentation and offsets in units of -8 bytes. Register 16 is the return address. At the
    // start of a function, the end of the frame is 8 above the stack pointer, and the return address is below the end.
    let mut entries = entry(&[0, 0, 0, 0, 1, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1]);
    let mut bytes: Vec<u8> = Vec::with_capacity(4096);
    let at = bytes.as_ptr().addr() as u64;
    // The code itself is never read.
    let code = at + 0x10_0000;
    let (index_length, mut start) = (12 + 8 * functions.len(), code);
    let mut index = vec![1, 0x1b, 0x03, 0x3b];
    index.extend(u32::try_from(index_length - 4).unwrap().to_le_bytes());
    index.extend(u32::try_from(functions.len()).unwrap().to_le_bytes());
    for (end, rules) in functions {
        let end = code + end;
        let place = index_length + entries.len();
        index.extend(u32::try_from(start - at).unwrap().to_le_bytes());
        index.extend(u32::try_from(place).unwrap().to_le_bytes());
        let to_first = u32::try_from(entries.len() + 4).unwrap().to_le_bytes();
        let extent = [start.to_le_bytes(), (end - start).to_le_bytes()].concat();
        entries.extend(entry(&[&to_first, &extent[..], rules].concat()));
        start = end;
    }
    bytes.extend(index);
    bytes.extend(entries);
    bytes.extend([0; 4]);
    assert!(bytes.len() <= bytes.capacity());
    let module = Module::with(code..code + 0x1000, at..at + index_length as u64, at..at + bytes.len() as u64);
    (bytes, module, code)
}

/// Adds the length in front, and pads to a multiple of 8.
#[cfg(target_arch = "x86_64")]
fn entry(content: &[u8]) -> Vec<u8> {
    let length = content.len().next_multiple_of(8) + 4;
    let mut entry = u32::try_from(length).unwrap().to_le_bytes().to_vec();
    entry.extend(content);
    entry.resize(4 + length, 0);
    entry
}

#[test]
#[cfg(target_arch = "x86_64")]
fn frames_of_all_kinds_are_walked() {
    const SP: u64 = 0x7fff_0000;
    let (plain, by_pointer, aligned, last, no_return, loses, gap) = (0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60);
    let functions: [Function<'_>; 6] = [
        // The end of the frame is 16 above the stack pointer.
        (by_pointer, &[0x0e, 16]),
        // The end of the frame is 16 above rbp; the old value of rbp is 16 below the end.
        (aligned, &[0x0c, 6, 16, 0x86, 2]),
        // The end of the frame is the word 8 below rbp; the old value of rbp is the word at rbp.
        (last, &[0x0f, 3, 0x76, 0x78, 0x06, 0x10, 6, 2, 0x76, 0]),
        (no_return, &[0x07, 16]),
        // The function ends with a call, whose return address is in the next function.
        (loses, &[0x0e, 24]),
        // The old value of rbp is lost.
        (gap, &[0x0e, 16, 0x07, 6]),
    ];
    let (_tables, module, code) = linked(&functions);
    let modules = Modules::with(vec![module]);
    // Walks from a function with this stack and this rbp, and counts the words that are read.
    let walk = |offset: u64, rbp: u64, stack: &[u64]| {
        let mut registers = [0; CALLEE_SAVED.len()];
        registers[1] = 8;
        let start = WalkStart { pc: code + offset, sp: SP, registers };
        let (mut visited, mut reads) = (Vec::new(), 0);
        let read = |address: u64| {
            reads += 1;
            let word = address.checked_sub(SP).and_then(|offset| stack.get(usize::try_from(offset / 8).ok()?));
            if address == 8 { Some(rbp) } else { word.copied() }
        };
        let mut unwinder = Unwinder::new();
        // SAFETY: the tables of the module live, and its code is never read.
        let walked = unsafe {
            unwinder.walk(&modules, &start, read, |walked| {
                visited.push(walked.address.wrapping_sub(code));
                true
            })
        };
        (walked.map(|()| visited), reads)
    };
    let at = |offset: u64| code + offset;
    let (inside, end) = (4, at(last) + 4);
    assert_eq!(walk(plain + inside, 0, &[9, end]), (Some(vec![last + 4]), 1));
    assert_eq!(walk(plain + inside, 0, &[9, 0]), (Some(vec![]), 1));
    // The call is the last instruction of a function, and the next function has another frame.
    assert_eq!(walk(plain + inside, 0, &[9, at(loses), 9, 9, end]), (Some(vec![loses, last + 4]), 2));
    // The walk uses rbp, passes a function that does not use rbp, and one that does.
    assert_eq!(walk(by_pointer + inside, SP + 16, &[9, 9, 7, end]), (Some(vec![last + 4]), 2));
    let through = [9, at(by_pointer) + 4, 9, 7, end];
    assert_eq!(walk(plain + inside, SP + 24, &through), (Some(vec![by_pointer + 4, last + 4]), 3));
    let two = [9, SP + 32, at(by_pointer) + 4, 9, 7, end];
    assert_eq!(walk(by_pointer + inside, SP + 8, &two), (Some(vec![by_pointer + 4, last + 4]), 4));
    // The frame is aligned: its end is a word on the stack, and so is rbp of the caller.
    let aligned_stack = [9, SP + 40, SP + 48, 9, at(by_pointer) + 4, 9, 7, end];
    let expected = Some(vec![by_pointer + 4, last + 4]);
    assert_eq!(walk(aligned + inside, SP + 16, &aligned_stack).0, expected);
    // The walk fails on these stacks.
    for (offset, rbp, stack) in [
        // The cases are: no such word, an address in no function, one in no module, a frame that ends below its start, and a
        // lost register.
        (plain + inside, 0, &[9][..]),
        (plain + inside, 0, &[9, at(gap) + 4]),
        (plain + inside, 0, &[9, 5]),
        (by_pointer + inside, SP - 32, &[9, 9]),
        (plain + inside, SP - 8, &[end, at(by_pointer) + 4]),
        (plain + inside, SP, &[SP, at(by_pointer) + 4]),
        (by_pointer + inside, u64::MAX - 7, &[9, 9]),
        (loses + inside, SP + 24, &[9, at(by_pointer) + 4, 9, 7, end]),
    ] {
        assert_eq!(walk(offset, rbp, stack).0, None, "from {offset:#x} with {stack:x?}");
    }
}
