use std::collections::HashMap;

use super::{
    DeviceModel, ModelError,
    units::{ALIGNMENT, PAGE, POOL_STEP},
};

const MIB: u64 = 1 << 20;

/// Runs a script on a device of 1024 MiB; `;` separates the steps. Sizes are in MiB, or in bytes with a `b`. Names stand for
/// addresses. A step that starts with the name of a value checks that value. `!oom`, `!unknown` and `!zero` before a step
/// mean that it must fail with this error, and a failed step must not change any value.
fn check(script: &str) {
    let mut device = DeviceModel::new(1024 * MIB);
    let mut addresses: HashMap<&str, u64> = HashMap::new();
    for step in script.split(';').map(str::trim).filter(|step| !step.is_empty()) {
        let mut words = step.split_whitespace().peekable();
        let failure = words.next_if(|word| word.starts_with('!'));
        let (verb, words) = (words.next().unwrap(), words.collect::<Vec<_>>());
        let size = |at: usize| match words[at].strip_suffix('b') {
            Some(bytes) => bytes.parse().unwrap(),
            None => words[at].parse::<u64>().unwrap() * MIB,
        };
        let before = values(&device);
        let outcome = match verb {
            "alloc" => device.alloc(size(1)),
            "async" => device.alloc_async(size(1)),
            "free" => device.free_block(addresses[words[0]]),
            "free_async" => device.free_async(addresses[words[0]]),
            "hold" => device.hold(size(0)).map(|()| 0),
            _ => Ok(0),
        };
        match (verb, outcome) {
            ("alloc" | "async", Ok(address)) => {
                addresses.insert(words[0], address);
            }
            ("alloc" | "async" | "free" | "free_async" | "hold", _) => (),
            ("release", _) => device.release(size(0)),
            ("sync", _) => device.synchronize(),
            ("trim", _) => device.trim_to(size(0)),
            ("threshold", _) => device.set_pool_release_threshold(size(0)),
            ("reset_high", _) => device.reset_pool_used_high(),
            ("clear", _) => device.clear(),
            ("same", _) => assert_eq!(addresses[words[0]], addresses[words[1]], "`{step}` in `{script}`"),
            (key, _) => {
                let (_, value) = before.iter().find(|(name, _)| *name == key).expect(key);
                assert_eq!(*value, size(0), "`{step}` in `{script}`");
            }
        }
        let expected = match failure {
            None => None,
            Some("!oom") => Some(ModelError::OutOfMemory),
            Some("!unknown") => Some(ModelError::UnknownAddress),
            Some("!zero") => Some(ModelError::ZeroBytes),
            Some(other) => panic!("no such error: {other}"),
        };
        assert_eq!(outcome.err(), expected, "`{step}` in `{script}`");
        if failure.is_some() {
            assert_eq!(values(&device), before, "`{step}` in `{script}` failed but changed a figure");
        }
        assert_eq!(device.total(), device.free() + device.used() + device.reserved(), "`{step}` in `{script}`");
    }
}

fn values(device: &DeviceModel) -> [(&'static str, u64); 6] {
    [
        ("used", device.used()),
        ("left", device.free()),
        ("pool_used", device.pool_used()),
        ("pool_reserved", device.pool_reserved()),
        ("pool_used_high", device.pool_used_high()),
        ("pool_reserved_high", device.pool_reserved_high()),
    ]
}

#[test]
fn blocks_use_whole_pages() {
    for script in [
        "used 0; left 1024",
        "alloc a 1b; used 2; left 1022; free a; used 0; left 1024",
        // Small blocks share pages.
        "alloc a 1b; alloc b 1; used 2; alloc c 1; used 4; free b; used 2; free a; used 2; free c; used 0",
        "alloc a 2; used 2; alloc b 2097153b; used 6; free a; used 4; free b; used 0",
        "alloc a 256; used 256; alloc b 256; used 512; free a; used 256",
        // Whole pages count, not the requested bytes.
        "alloc a 1023; used 1024; !oom alloc b 1b; free a; alloc b 1b; used 2",
        "alloc a 1024; left 0; free a; !oom alloc b 1025; alloc c 1024",
        "!oom alloc a 18446744073709551615b; !zero alloc a 0; !zero async a 0",
        "alloc a 1; free a; !unknown free a",
        "alloc a 1; async b 1; !unknown free b; !unknown free_async a",
    ] {
        check(script);
    }
}

#[test]
fn the_last_freed_address_of_a_size_is_reused_first() {
    for script in [
        "alloc a 4; free a; alloc b 4; same a b",
        "alloc a 4; alloc b 4; free a; free b; alloc c 4; same b c; alloc d 4; same a d",
        "async a 4; free_async a; async b 4; same a b",
    ] {
        check(script);
    }
}

#[test]
fn the_pool_grows_in_steps_and_shrinks_when_synchronised() {
    for script in [
        "async a 1b; pool_used 1b; pool_reserved 32; used 32; free_async a; pool_used 0; used 32; sync; used 0",
        "async a 32; used 32; async b 1b; used 64; free_async b; sync; used 32",
        // Freed memory is reused in stream order, and the pool does not grow.
        "async a 32; free_async a; async b 32; used 32; pool_used 32",
        "async a 32; free_async a; async b 1; used 32; pool_used 1; sync; used 32",
        // A trim before a synchronization frees nothing; after it, only the used memory stays.
        "threshold 1024; async a 64; free_async a; trim 0; used 64; sync; used 64; trim 33; used 64; trim 32; used 32; trim 0; used 0",
        "threshold 1024; async a 33; async b 64; free_async b; sync; used 128; trim 0; used 64; pool_used 33",
        "threshold 64; async a 128; free_async a; sync; used 64; threshold 0; sync; used 0",
        // On a full device the pool cannot grow, but its backing is still used.
        "hold 992; async a 1; used 1024; async b 31; !oom async c 1b; free_async b; async c 31; !oom alloc d 1b",
        "!oom async a 18446744073709551615b; async a 1; !oom async b 18446744073709551615b",
    ] {
        check(script);
    }
}

#[test]
fn a_reset_sets_the_high_water_mark_to_the_current_usage() {
    for script in [
        "async a 64; async b 512; free_async b; pool_used_high 576; reset_high; pool_used_high 64; pool_reserved_high 576",
        "async a 64; reset_high; free_async a; pool_used_high 64; reset_high; pool_used_high 0; async b 1; pool_used_high 1",
    ] {
        check(script);
    }
}

/// All blocks have different sizes and need 16 TiB in total, so freed addresses must be merged before they are reused.
#[test]
fn live_blocks_never_share_an_address() {
    const TIB: u64 = 1 << 40;
    let mut device = DeviceModel::new(8 * TIB);
    let pooled = device.alloc_async(TIB / 2).unwrap();
    let mut kept = vec![(pooled, TIB / 2)];
    for round in 0..64 {
        let bytes = TIB / 4 + round * MIB;
        let address = device.alloc(bytes).unwrap();
        if round % 16 == 0 {
            kept.push((address, bytes));
        } else {
            device.free_block(address).unwrap();
        }
        let in_pool = device.alloc_async(bytes).unwrap();
        device.free_async(in_pool).unwrap();
        device.synchronize();
        for new in [(address, bytes), (in_pool, bytes)] {
            assert!(new.0 + new.1 <= 1 << 48);
            for old in kept.iter().filter(|old| **old != new) {
                assert!(new.0 >= old.0 + old.1 || old.0 >= new.0 + new.1, "{new:x?} overlaps {old:x?}");
            }
        }
    }
    for (address, bytes) in kept {
        assert_eq!(device.block_at(address), Some((address, bytes)));
    }
}

/// All of it can be allocated at once, in many blocks and in one.
#[test]
fn a_large_device_has_an_address_for_each_byte() {
    for total in [1 << 43, (1 << 43) + PAGE, 1 << 50, DeviceModel::LARGEST] {
        let mut device = DeviceModel::new(total);
        assert!(device.addresses_end() <= 1 << 57);
        for blocks in [1024, 1] {
            let allocated: Vec<_> = std::iter::from_fn(|| device.alloc(total / blocks / PAGE * PAGE).ok()).collect();
            assert_eq!(allocated.len() as u64, blocks, "{total}");
            assert!(allocated.iter().all(|address| address + total / blocks <= device.addresses_end()));
            for address in allocated {
                device.free_block(address).unwrap();
            }
        }
        let pooled = total / POOL_STEP * POOL_STEP;
        let all = device.alloc_async(pooled).unwrap();
        assert!(all + pooled <= device.addresses_end());
    }
}

/// The device has more memory than there are addresses.
#[test]
fn there_is_no_memory_without_an_address() {
    let mut device = DeviceModel::new(u64::MAX / 2);
    let blocks: Vec<_> = std::iter::from_fn(|| device.alloc(1 << 52).ok()).collect();
    assert_eq!((blocks.len(), device.alloc(1 << 52)), (8, Err(ModelError::OutOfMemory)));
    device.free_block(blocks[3]).unwrap();
    assert_eq!(device.alloc((1 << 52) - MIB), Ok(blocks[3]));
}

#[test]
fn other_processes_use_memory_too() {
    for script in [
        "hold 527; used 527; !oom alloc a 498; alloc a 496; !oom hold 2; release 527; used 496; release 1; used 496",
        "hold 100; alloc a 100; async b 1; clear; used 100; pool_used 0; pool_reserved 0; !unknown free a",
    ] {
        check(script);
    }
}

#[test]
fn reserved_memory_is_neither_free_nor_used() {
    let mut device = DeviceModel::new(1024 * MIB).with_reserved(615 * MIB);
    assert_eq!((device.free(), device.used(), device.reserved()), (409 * MIB, 0, 615 * MIB));
    assert_eq!(device.alloc(410 * MIB), Err(ModelError::OutOfMemory));
    assert_eq!(DeviceModel::new(MIB).with_reserved(u64::MAX).free(), 0);
}

#[test]
fn addresses_are_aligned_and_their_blocks_are_found() {
    let mut device = DeviceModel::new(1024 * MIB);
    let blocks = [(device.alloc(1).unwrap(), 1), (device.alloc(3 * MIB).unwrap(), 3 * MIB)];
    let pooled = [(device.alloc_async(1000).unwrap(), 1000), (device.alloc_async(1).unwrap(), 1)];
    for (address, bytes) in blocks.into_iter().chain(pooled) {
        assert_eq!(address % ALIGNMENT, 0);
        assert_eq!(device.block_at(address), Some((address, bytes)));
        assert_eq!(device.block_at(address + bytes - 1), Some((address, bytes)));
        assert_eq!(device.block_at(address + bytes), None);
    }
    assert_eq!(device.block_at(0), None);
    assert_eq!(device.free_block(blocks[1].0), Ok(3 * MIB));
    assert_eq!(device.free_async(pooled[0].0), Ok(1000));
    assert_eq!(device.block_at(blocks[1].0), None);
}
