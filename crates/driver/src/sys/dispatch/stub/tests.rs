//! Tests the decoding of stubs, byte by byte.

use super::*;

/// The form of the stubs of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The form of drivers 470 to 555, and, with a frame, of driver 580.
    X86_64 { framed: bool },
    /// The form of drivers 535 and 550. The four instructions before the comparison have one of these orders. The pointer is loaded
    /// into x16, or into another register and copied there.
    Arm64 { order: Order, copied: bool },
}

/// `A` is adrp of the flag, `Z` the lower half of the constant, `K` the upper half, and `L` the flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Azkl,
    Zkal,
    Azlk,
    Alzk,
}

impl Form {
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::X86_64 { framed: false }, Self::X86_64 { framed: true }];
        for order in [Order::Azkl, Order::Zkal, Order::Azlk, Order::Alzk] {
            all.extend([true, false].map(|copied| Self::Arm64 { order, copied }));
        }
        all
    }

    pub(crate) fn processor(self) -> Processor {
        match self {
            Self::X86_64 { .. } => Processor::X86_64,
            Self::Arm64 { .. } => Processor::Arm64,
        }
    }

    /// Returns the distance from one stub to the next.
    pub(crate) fn distance(self) -> usize {
        match self {
            Self::X86_64 { framed: true } => 192,
            _ => 64,
        }
    }

    /// Returns the distance from the start of a stub to its refusal.
    pub(crate) fn error_path(self) -> usize {
        match self {
            Self::X86_64 { framed: false } => 18,
            Self::X86_64 { framed: true } => 176,
            Self::Arm64 { .. } => 40,
        }
    }

    /// Returns the number of bytes that identify the stub.
    pub(crate) fn length(self) -> usize {
        match self {
            Self::X86_64 { framed: false } => 18,
            Self::X86_64 { framed: true } => 32,
            Self::Arm64 { copied, .. } => 36 + 4 * usize::from(copied),
        }
    }

    /// Returns the bytes between stubs: a `nop`.
    pub(crate) fn filler(self) -> u8 {
        if self.processor() == Processor::X86_64 { 0x90 } else { 0 }
    }

    /// Writes a stub at this address.
    pub(crate) fn assemble(self, code: &mut [u8], address: usize, stub: Stub) {
        let mut bytes = Vec::new();
        let by = |to: usize, from: usize| i32::try_from(to.cast_signed() - from.cast_signed()).unwrap().to_le_bytes();
        match self {
            Self::X86_64 { framed } => {
                if framed {
                    bytes.extend([0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x48, 0x83, 0xec, 0x08]);
                }
                bytes.extend([0x81, 0x3d]);
                bytes.extend(by(stub.flag, address + bytes.len() + 8));
                bytes.extend([0x00, 0xba, 0x1c, 0x32]);
                if framed {
                    bytes.extend([0x0f, 0x84]);
                    bytes.extend(by(stub.error_path, address + bytes.len() + 4));
                } else {
                    bytes.extend([0x74, by(stub.error_path, address + bytes.len() + 2)[0]]);
                }
                bytes.extend([0xff, if framed { 0x15 } else { 0x25 }]);
                bytes.extend(by(stub.slot, address + bytes.len() + 4));
                let error_path: &[u8] = if framed { &[0x41, 0xbc, 4, 0, 0, 0] } else { &[0xb8, 4, 0, 0, 0, 0xc3] };
                code[self.error_path()..][..6].copy_from_slice(error_path);
            }
            Self::Arm64 { order, copied } => {
                let letters = match order {
                    Order::Azkl => "AZKL",
                    Order::Zkal => "ZKAL",
                    Order::Azlk => "AZLK",
                    Order::Alzk => "ALZK",
                };
                let mut words = Vec::new();
                for letter in letters.chars() {
                    let pc = address + words.len() * 4;
                    words.push(match letter {
                        'A' => adrp(17, pc, stub.flag),
                        // mov w8, #0xba00
                        'Z' => 0x5297_4008,
                        // movk w8, #0x321c, lsl #16
                        'K' => 0x72a6_4388,
                        // ldr w17, [x17, #flag]
                        _ => 0xb940_0000 | u32::try_from(stub.flag % 4096 / 4).unwrap() << 10 | 0b10001 << 5 | 0b10001,
                    });
                }
                // cmp w17, w8
                words.push(0x6b08_023f);
                let by = u32::try_from(stub.error_path - address - 4 * words.len()).unwrap() / 4;
                words.push(0x5400_0000 | by << 5);
                let base = if copied { 9 } else { 16 };
                words.push(adrp(base, address + words.len() * 4, stub.slot));
                let offset = u32::try_from(stub.slot % 4096 / 8).unwrap();
                words.push(0xf940_0000 | offset << 10 | base << 5 | base);
                if copied {
                    // mov x16, x9
                    words.push(0xaa09_03f0);
                }
                // br x16
                words.push(0xd61f_0200);
                bytes.extend(words.into_iter().flat_map(u32::to_le_bytes));
                // mov w0, #4; ret
                let error_path = [0x5280_0080_u32, 0xd65f_03c0].map(u32::to_le_bytes).concat();
                code[self.error_path()..][..8].copy_from_slice(&error_path);
            }
        }
        assert_eq!(bytes.len(), self.length());
        code[..bytes.len()].copy_from_slice(&bytes);
    }
}

/// Encodes `adrp x, page`: the upper 19 of 21 bits from bit 5 on, the lower two at bit 29.
fn adrp(to: u32, pc: usize, target: usize) -> u32 {
    let pages = (target.cast_signed() >> 12) - (pc.cast_signed() >> 12);
    let pages = u32::try_from(pages & 0x1f_ffff).unwrap();
    0x9000_0000 | (pages & 3) << 29 | (pages >> 2) << 5 | to
}

fn bytes(hex: &str) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    for (byte, digits) in bytes.iter_mut().zip(hex.split_whitespace()) {
        *byte = u8::from_str_radix(digits, 16).unwrap();
    }
    bytes
}

fn code(words: &[u32]) -> [u8; LENGTH] {
    let mut code = [0; LENGTH];
    for (bytes, word) in code.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    code
}

/// `cuMemAlloc_v2` of driver 580.159.04.
#[test]
fn a_stub_of_driver_580_is_decoded() {
    let code = bytes(
        "55 48 89 e5 41 54 48 83 ec 08 81 3d 3c a4 8a 05 00 ba 1c 32 0f 84 96 00 00 00 ff 15 58 48 8a 05 41 89 c4 85 c0 74 0f",
    );
    let stub = Stub { slot: 0x5bd_0178, flag: 0x5bd_5d50, error_path: 0x32_b9b0 };
    assert_eq!(Processor::X86_64.decode(&code, 0x32_b900), Some(stub));
    assert_eq!(Processor::Arm64.decode(&code, 0x32_b900), None);
    let error_path = bytes("41 bc 04 00 00 00 44 89 e0 4c 8b 65 f8 c9 c3");
    assert!(Processor::X86_64.is_error_path(&error_path) && !Processor::Arm64.is_error_path(&error_path));
    let mut found = Vec::new();
    Processor::X86_64.each_jump(&code, 0x32_b900, |at, slot| found.push((at, slot)));
    assert_eq!(found, [(0x32_b91a, 0x5bd_0178)]);
}

#[test]
fn stubs_of_drivers_470_to_555_are_decoded() {
    let code = bytes("81 3d 00 10 00 00 00 ba 1c 32 74 06 ff 25 f0 ff ff ff b8 04 00 00 00 c3");
    let stub = Stub { slot: 0x4002, flag: 0x500a, error_path: 0x4012 };
    assert_eq!(Processor::X86_64.decode(&code, 0x4000), Some(stub));
    assert!(Processor::X86_64.is_error_path(&bytes("b8 04 00 00 00 c3")));
    assert!(!Processor::X86_64.is_error_path(&bytes("b8 03 00 00 00 c3")));
    // A stub with a frame calls; a stub without one jumps.
    let calls = bytes("81 3d 00 10 00 00 00 ba 1c 32 74 06 ff 15 f0 ff ff ff b8 04 00 00 00 c3");
    assert_eq!(Processor::X86_64.decode(&calls, 0x4000), None);
    // Decoding does not overflow at the end of the address space.
    assert_eq!(Processor::X86_64.decode(&code, usize::MAX - 200).map(|stub| stub.flag), None);
}

#[test]
fn stubs_of_arm64_are_decoded() {
    let stub = Stub { slot: 0x1_2345_6678, flag: 0x1_2000_0abc, error_path: 0x1_0000_0128 };
    let address = 0x1_0000_0100;
    for order in [Order::Azkl, Order::Zkal, Order::Azlk, Order::Alzk] {
        for copied in [true, false] {
            let mut code = [0; LENGTH];
            Form::Arm64 { order, copied }.assemble(&mut code, address, stub);
            assert_eq!(Processor::Arm64.decode(&code, address), Some(stub), "{order:?} {copied}");
            assert_eq!(Processor::X86_64.decode(&code, address), None);
            let mut found = Vec::new();
            Processor::Arm64.each_jump(&code, address, |at, slot| found.push((at, slot)));
            assert_eq!(found, [(address + 24, stub.slot)]);
        }
    }
    assert!(
        Processor::Arm64.is_error_path(&code(&[0x5280_0080])) && !Processor::Arm64.is_error_path(&code(&[0x5280_0060]))
    );
    assert!(!Processor::X86_64.is_error_path(&code(&[0x5280_0080])));
}

/// These words are encoded by hand from the Arm manual, not by the functions above.
#[test]
fn instructions_of_arm64_are_distinguished() {
    // adrp x0, 0x5000; mov w1, #0xba00; movk w1, #0x321c, lsl #16; ldr w2, [x0, #2748]; cmp w2, w1; b.eq +20;
    // adrp x3, 0x3000 (backwards); ldr x3, [x3, #8]; mov x16, x3; br x16
    let good = [
        0xb000_0000,
        0x5297_4001,
        0x72a6_4381,
        0xb94a_bc02,
        0x6b01_005f,
        0x5400_00a0,
        0xf0ff_ffe3,
        0xf940_0463,
        0xaa03_03f0,
        0xd61f_0200,
    ];
    let stub = Stub { slot: 0x3008, flag: 0x5abc, error_path: 0x4128 };
    let decode = |words: &[u32]| Processor::Arm64.decode(&code(words), 0x4100);
    assert_eq!(decode(&good), Some(stub));
    // `cmp w1, w2`, with swapped operands.
    let changed = |at: usize, word: u32| {
        let mut words = good;
        words[at] = word;
        decode(&words)
    };
    assert_eq!(changed(4, 0x6b02_003f), Some(stub));
    for (at, word, what) in [
        (0, 0x3000_0000, "adr"),
        (1, 0x5297_4003, "another register is loaded with the constant"),
        (1, 0x5297_4021, "another constant"),
        (1, 0x1297_4001, "movn"),
        (1, 0xd297_4001, "mov of a whole register"),
        (2, 0x72a6_4382, "another register"),
        (2, 0x72c6_4381, "lsl #32"),
        (3, 0xb94a_bc22, "from an address that was not computed"),
        (3, 0xb90a_bc02, "str"),
        (4, 0x6b01_007f, "another register is compared"),
        (4, 0x2b01_005f, "cmn"),
        (4, 0xeb01_005f, "cmp of whole registers"),
        (5, 0x5400_00a1, "b.ne"),
        (6, 0x70ff_ffe3, "adr"),
        (7, 0xf940_0464, "into another register than is copied"),
        (7, 0xf940_0443, "from another address than was made"),
        (7, 0xb940_0463, "half a pointer"),
        (8, 0xaa03_03f1, "into x17"),
        (8, 0xaa03_07f0, "shifted"),
        (9, 0xd61f_0220, "br x17"),
        (9, 0xd63f_0200, "blr x16"),
        (9, 0xd65f_0200, "ret x16"),
    ] {
        assert_eq!(changed(at, word), None, "{what}");
    }
}
