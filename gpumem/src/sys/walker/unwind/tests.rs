//! Tables of compilers, broken ones, and some of a test's own.

use std::sync::Arc;

use super::{
    super::{
        modules::Module,
        tables::{Tables, memory},
    },
    *,
};

/// An address at the beginning and one in the middle of each function of a module.
fn addresses(module: &Module) -> Vec<u64> {
    let tables = Tables::of(module).unwrap();
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
fn compilers_say_nothing_that_it_does_not_rule_for() {
    let mut context = UnwindContext::new_in();
    for address in [addresses as *const () as usize, libc::qsort as *const () as usize] {
        let (_modules, module) = module_of(address as u64);
        let addresses = addresses(&module);
        let has_rule = |address: &&u64| rule_for(&module, **address, &mut context).is_some();
        let count = addresses.iter().filter(has_rule).count();
        assert!(count > 2000 && count * 1000 > addresses.len() * 998, "{count} of {}", addresses.len());
    }
}

/// Damaged tables: the walk may fail, but it reads no other memory and does not panic.
#[test]
fn broken_tables_do_no_harm() {
    let (modules, _) = module_of(addresses as *const () as u64);
    let size = |module: &&Module| module.readable_up_to(module.index.start).unwrap() - module.index.start;
    let smallest = modules.all().iter().min_by_key(size).expect("there are some");
    let addresses = addresses(smallest);
    let (from, to) = (smallest.index.start, smallest.readable_up_to(smallest.index.start).unwrap());
    // SAFETY: the module is loaded, and nobody unloads it.
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
        // The copy counts from where it is itself.
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
        let count =
            addresses.iter().filter(|address| rule_for(&module, address.wrapping_add(moved), &mut context).is_some());
        let count = count.count();
        assert!(round > 0 || count == addresses.len(), "{count} of {}", addresses.len());
        broken += usize::from(count < addresses.len());
    }
    assert!(broken > 100, "{broken} were broken");
}

/// A function of a test's own: how far behind the first one's begin it ends, and what its table says.
type Function<'a> = (u64, &'a [u8]);

/// Tables as a linker writes them, of functions that lie side by side, and where these begin: `.eh_frame_hdr`, then `.eh_frame`.
#[cfg(target_arch = "x86_64")]
fn linked(functions: &[Function<'_>]) -> (Vec<u8>, Module, u64) {
    // Version 1, no augmentation, offsets count 8 bytes downwards, 16 is where a function returns to. At its begin the
    // frame's end is 8 above the stack pointer, and the return address below that.
    let mut entries = entry(&[0, 0, 0, 0, 1, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1]);
    let mut bytes: Vec<u8> = Vec::with_capacity(4096);
    let at = bytes.as_ptr().addr() as u64;
    // Nobody reads the code itself.
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

/// With its length in front, filled up to a multiple of 8.
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
fn frames_of_all_sorts() {
    const SP: u64 = 0x7fff_0000;
    let (plain, by_pointer, aligned, last, no_return, loses, gap) = (0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60);
    let functions: [Function<'_>; 6] = [
        // The frame's end is 16 above the stack pointer.
        (by_pointer, &[0x0e, 16]),
        // It is 16 above rbp, whose old value is 16 below it.
        (aligned, &[0x0c, 6, 16, 0x86, 2]),
        // It is the word 8 below rbp, whose old value is where rbp points to.
        (last, &[0x0f, 3, 0x76, 0x78, 0x06, 0x10, 6, 2, 0x76, 0]),
        (no_return, &[0x07, 16]),
        // It ends with a call, which returns to the next function.
        (loses, &[0x0e, 24]),
        // It leaves nothing of rbp.
        (gap, &[0x0e, 16, 0x07, 6]),
    ];
    let (_tables, module, code) = linked(&functions);
    let modules = Modules::with(vec![module]);
    // Begins in a function with this stack and this rbp. It counts the words that are read besides return addresses.
    let walk = |begin: u64, rbp: u64, stack: &[u64]| {
        let mut registers = [0; CALLEE_SAVED.len()];
        registers[1] = 8;
        let start = WalkStart { pc: code + begin, sp: SP, registers };
        let (mut visited, mut reads) = (Vec::new(), 0);
        let read = |address: u64| {
            reads += 1;
            let word = address.checked_sub(SP).and_then(|offset| stack.get(usize::try_from(offset / 8).ok()?));
            if address == 8 { Some(rbp) } else { word.copied() }
        };
        let walked = Unwinder::new().walk(&modules, &start, read, |walked| {
            visited.push(walked.address.wrapping_sub(code));
            true
        });
        (walked.map(|()| visited), reads)
    };
    let at = |offset: u64| code + offset;
    let (inside, end) = (4, at(last) + 4);
    assert_eq!(walk(plain + inside, 0, &[9, end]), (Some(vec![last + 4]), 1));
    assert_eq!(walk(plain + inside, 0, &[9, 0]), (Some(vec![]), 1));
    // Called at the end of a function: the next one has another frame.
    assert_eq!(walk(plain + inside, 0, &[9, at(loses), 9, 9, end]), (Some(vec![loses, last + 4]), 2));
    // By rbp, and through one that leaves it alone, and through one that uses it too.
    assert_eq!(walk(by_pointer + inside, SP + 16, &[9, 9, 7, end]), (Some(vec![last + 4]), 2));
    let through = [9, at(by_pointer) + 4, 9, 7, end];
    assert_eq!(walk(plain + inside, SP + 24, &through), (Some(vec![by_pointer + 4, last + 4]), 3));
    let two = [9, SP + 32, at(by_pointer) + 4, 9, 7, end];
    assert_eq!(walk(by_pointer + inside, SP + 8, &two), (Some(vec![by_pointer + 4, last + 4]), 4));
    // Aligned: the frame's end is a word, and so is rbp of the caller.
    let aligned_stack = [9, SP + 40, SP + 48, 9, at(by_pointer) + 4, 9, 7, end];
    let expected = Some(vec![by_pointer + 4, last + 4]);
    assert_eq!(walk(aligned + inside, SP + 16, &aligned_stack).0, expected);
    // What cannot be gone on from.
    for (begin, rbp, stack) in [
        // No word there, not in a function, in no module, backwards, and a register that is lost.
        (plain + inside, 0, &[9][..]),
        (plain + inside, 0, &[9, at(gap) + 4]),
        (plain + inside, 0, &[9, 5]),
        (by_pointer + inside, SP - 32, &[9, 9]),
        (plain + inside, SP - 8, &[end, at(by_pointer) + 4]),
        (plain + inside, SP, &[SP, at(by_pointer) + 4]),
        (by_pointer + inside, u64::MAX - 7, &[9, 9]),
        (loses + inside, SP + 24, &[9, at(by_pointer) + 4, 9, 7, end]),
    ] {
        assert_eq!(walk(begin, rbp, stack).0, None, "from {begin:#x} with {stack:x?}");
    }
}
