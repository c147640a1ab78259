//! Decodes the exported functions of `libcuda`: stubs that call the driver's implementation through a pointer.
//!
//! NVIDIA documents neither the stubs nor the pointers. Therefore a stub is accepted only if it consists of the same instructions, in the
//! same order and with the same registers, as in the drivers 470 to 580 (x86-64) and 535 to 550 (arm64).

/// The number of bytes that are decoded. No stub is longer.
pub(super) const LENGTH: usize = 64;

/// The addresses in a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stub {
    /// The pointer to the implementation.
    pub(super) slot: usize,
    /// A word that the stub compares with [`DEINITIALIZED`]. All stubs of a driver share it.
    pub(super) flag: usize,
    /// The address at which the stub continues if the driver was shut down. The code there returns 4.
    pub(super) error_path: usize,
}

/// The value of the flag after the driver was shut down.
const DEINITIALIZED: u32 = 0x321c_ba00;

/// `CUDA_ERROR_DEINITIALIZED`
const RETURNED: u8 = 4;

/// The instruction set of the stubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Processor {
    X86_64,
    Arm64,
}

impl Processor {
    /// Decodes the stub at `address`, which starts with `code`. Returns `None` if it is not a known stub.
    pub(super) fn decode(self, code: &[u8; LENGTH], address: usize) -> Option<Stub> {
        match self {
            Self::X86_64 => x86_64(code, address),
            Self::Arm64 => aarch64(code, address),
        }
    }

    /// Returns whether `code` starts with the instructions by which a stub returns [`RETURNED`].
    pub(super) fn is_error_path(self, code: &[u8; LENGTH]) -> bool {
        let first: &[&[u8]] = match self {
            // The code is `mov eax, 4`, or `mov r12d, 4` with a frame.
            Self::X86_64 => &[&[0xb8, RETURNED, 0, 0, 0], &[0x41, 0xbc, RETURNED, 0, 0, 0]],
            // The code is `mov w0, 4`.
            Self::Arm64 => &[&[RETURNED << 5, 0x00, 0x80, 0x52]],
        };
        first.iter().any(|first| code.starts_with(first))
    }

    /// Finds all instructions in the code at `address` that can be the end of a stub: jumps and calls through a pointer. Calls `found` with
    /// the address of each instruction and the address of the pointer.
    pub(super) fn each_jump(self, code: &[u8], address: usize, mut found: impl FnMut(usize, usize)) {
        match self {
            Self::X86_64 => {
                for (at, window) in code.windows(6).enumerate() {
                    if let [0xff, 0x15 | 0x25, by @ ..] = window {
                        let by = by.try_into().map_or(0, i32::from_le_bytes);
                        if let Some(slot) = (address + at + 6).checked_add_signed(by as isize) {
                            found(address + at, slot);
                        }
                    }
                }
            }
            Self::Arm64 => {
                let words = words(code);
                for at in 0..words.len() {
                    if let Some(slot) = jump_of_arm64(&words[at..], address + 4 * at) {
                        found(address + 4 * at, slot);
                    }
                }
            }
        }
    }
}

/// ```text
///   [push rbp; mov rbp, rsp; push r12; sub rsp, 8]    580: the stub logs errors after the call
///   cmp dword [rip + flag], 0x321cba00
///   je refusal
///   [movzx of narrow arguments; 580: pushes of the arguments on the stack]
///   jmp qword [rip + slot]                            580: call
/// ```
fn x86_64(code: &[u8; LENGTH], address: usize) -> Option<Stub> {
    const FRAME: [u8; 10] = [0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x48, 0x83, 0xec, 0x08];

    let has_frame = code.starts_with(&FRAME);
    let mut reader = Reader { code, at: if has_frame { FRAME.len() } else { 0 }, address };
    reader.expect(&[0x81, 0x3d])?;
    let flag = reader.displacement()?;
    reader.expect(&DEINITIALIZED.to_le_bytes())?;
    // The displacement is relative to the end of the instruction, which is after the constant.
    let flag = flag.checked_add_signed(4)?;
    let error_path = if reader.expect(&[0x74]).is_some() {
        reader.short_displacement()?
    } else {
        reader.expect(&[0x0f, 0x84])?;
        reader.displacement()?
    };
    while reader.argument().is_some() {}
    reader.expect(&[0xff, if has_frame { 0x15 } else { 0x25 }])?;
    let slot = reader.displacement()?;
    Some(Stub { slot, flag, error_path })
}

/// Reads bytes in order.
struct Reader<'a> {
    code: &'a [u8; LENGTH],
    at: usize,
    address: usize,
}

impl Reader<'_> {
    fn expect(&mut self, bytes: &[u8]) -> Option<()> {
        self.code[self.at..].starts_with(bytes).then(|| self.at += bytes.len())
    }

    /// Skips an instruction that prepares an argument for the implementation. Returns `None` if there is none.
    fn argument(&mut self) -> Option<()> {
        const WHOLE: [&[u8]; 8] = [
            // These are `sub rsp, 8` and `push rax`.
            &[0x48, 0x83, 0xec, 0x08],
            &[0x50],
            // These are `movzx esi, sil`, `movzx edx, dl`, `movzx ecx, cl`, and the same with 16 bits.
            &[0x40, 0x0f, 0xb6, 0xf6],
            &[0x0f, 0xb6, 0xd2],
            &[0x0f, 0xb6, 0xc9],
            &[0x0f, 0xb7, 0xf6],
            &[0x0f, 0xb7, 0xd2],
            &[0x0f, 0xb7, 0xc9],
        ];
        // These are `push qword [rbp + a byte]` and `mov eax, [rbp + a byte]`.
        const WITH_BYTE: [&[u8]; 2] = [&[0xff, 0x75], &[0x8b, 0x45]];
        if WHOLE.iter().any(|instruction| self.expect(instruction).is_some()) {
            return Some(());
        }
        WITH_BYTE.iter().find(|instruction| self.expect(instruction).is_some())?;
        self.read::<1>().map(drop)
    }

    fn read<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.code.get(self.at..self.at + N)?.try_into().ok()?;
        self.at += N;
        Some(bytes)
    }

    /// Reads an address that is encoded as 32 bits, relative to the byte after them.
    fn displacement(&mut self) -> Option<usize> {
        let by = i32::from_le_bytes(self.read()?);
        (self.address + self.at).checked_add_signed(by as isize)
    }

    /// Reads an address like [`displacement`](Self::displacement), in 8 bits.
    fn short_displacement(&mut self) -> Option<usize> {
        let [by] = self.read()?;
        (self.address + self.at).checked_add_signed(isize::from(by.cast_signed()))
    }
}

/// ```text
///   adrp a, flag; mov b, 0xba00; movk b, 0x321c, lsl 16; ldr c, [a, flag]     in any order in which each uses earlier results
///   cmp c, b
///   b.eq refusal
///   adrp d, slot; ldr d, [d, slot]; mov x16, d; br x16
/// ```
fn aarch64(code: &[u8; LENGTH], address: usize) -> Option<Stub> {
    let words = words(code);
    let pc = |at: usize| address + 4 * at;
    // The value of each register after the first instructions.
    let mut registers = [RegisterValue::Unknown; 32];
    for (at, word) in words.iter().enumerate().take(4) {
        let instruction = Instruction::of(*word)?;
        match instruction {
            Instruction::Adrp { to, pages } => registers[to] = RegisterValue::Page(page(pc(at), pages)?),
            Instruction::Movz { to, value } => registers[to] = RegisterValue::Constant(value),
            Instruction::Movk { to, upper } => {
                let RegisterValue::Constant(lower @ ..=0xffff) = registers[to] else { return None };
                registers[to] = RegisterValue::Constant(upper << 16 | lower);
            }
            Instruction::LoadWord { to, base, offset } => {
                let RegisterValue::Page(page) = registers[base] else { return None };
                registers[to] = RegisterValue::Loaded(page + offset);
            }
            _ => return None,
        }
    }
    let [compare, branch, jump @ ..] = &words[4..] else { return None };
    let Instruction::Compare { left, right } = Instruction::of(*compare)? else { return None };
    let held = (registers[left], registers[right]);
    let ((RegisterValue::Loaded(flag), RegisterValue::Constant(DEINITIALIZED))
    | (RegisterValue::Constant(DEINITIALIZED), RegisterValue::Loaded(flag))) = held
    else {
        return None;
    };
    let Instruction::BranchEqual { by } = Instruction::of(*branch)? else { return None };
    let error_path = pc(5).checked_add_signed(by)?;
    Some(Stub { slot: jump_of_arm64(jump, pc(6))?, flag, error_path })
}

/// Returns the pointer through which these instructions jump. They are the last line above.
fn jump_of_arm64(words: &[u32], address: usize) -> Option<usize> {
    let [adrp, load, rest @ ..] = words else { return None };
    let Instruction::Adrp { to: base, pages } = Instruction::of(*adrp)? else { return None };
    let Instruction::Load { to, base: loaded_from, offset } = Instruction::of(*load)? else { return None };
    if loaded_from != base {
        return None;
    }
    let slot = page(address, pages)? + offset;
    // The pointer may be loaded into x16 itself.
    let jump = if to == 16 {
        rest.first()?
    } else {
        let [copy, jump, ..] = rest else { return None };
        if Instruction::of(*copy)? != (Instruction::Copy { to: 16, from: to }) {
            return None;
        }
        jump
    };
    (Instruction::of(*jump)? == Instruction::Jump { to: 16 }).then_some(slot)
}

fn words(code: &[u8]) -> Vec<u32> {
    code.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes)).collect()
}

fn page(pc: usize, pages: isize) -> Option<usize> {
    (pc & !0xfff).checked_add_signed(pages.checked_mul(0x1000)?)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RegisterValue {
    Unknown,
    Page(usize),
    Constant(u32),
    /// The word at this address.
    Loaded(usize),
}

/// The instructions of arm64 that occur in stubs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Instruction {
    Adrp {
        to: usize,
        pages: isize,
    },
    /// `mov w, #value`
    Movz {
        to: usize,
        value: u32,
    },
    /// `movk w, #upper, lsl #16`
    Movk {
        to: usize,
        upper: u32,
    },
    /// `ldr w, [x, #offset]`
    LoadWord {
        to: usize,
        base: usize,
        offset: usize,
    },
    /// `ldr x, [x, #offset]`
    Load {
        to: usize,
        base: usize,
        offset: usize,
    },
    /// `cmp w, w`
    Compare {
        left: usize,
        right: usize,
    },
    BranchEqual {
        by: isize,
    },
    /// `mov x, x`
    Copy {
        to: usize,
        from: usize,
    },
    Jump {
        to: usize,
    },
}

impl Instruction {
    /// The encodings come from the Arm Architecture Reference Manual, section C4.1.
    fn of(word: u32) -> Option<Self> {
        let bits = |low: u32, count: u32| word >> low & ((1 << count) - 1);
        let register = |low: u32| bits(low, 5) as usize;
        let signed = |value: u32, width: u32| (value.cast_signed() << (32 - width) >> (32 - width)) as isize;
        Some(match word {
            _ if word & 0x9f00_0000 == 0x9000_0000 => {
                Self::Adrp { to: register(0), pages: signed(bits(5, 19) << 2 | bits(29, 2), 21) }
            }
            _ if word & 0xffe0_0000 == 0x5280_0000 => Self::Movz { to: register(0), value: bits(5, 16) },
            _ if word & 0xffe0_0000 == 0x72a0_0000 => Self::Movk { to: register(0), upper: bits(5, 16) },
            _ if word & 0xffc0_0000 == 0xb940_0000 => {
                Self::LoadWord { to: register(0), base: register(5), offset: bits(10, 12) as usize * 4 }
            }
            _ if word & 0xffc0_0000 == 0xf940_0000 => {
                Self::Load { to: register(0), base: register(5), offset: bits(10, 12) as usize * 8 }
            }
            _ if word & 0xffe0_fc1f == 0x6b00_001f => Self::Compare { left: register(5), right: register(16) },
            _ if word & 0xff00_001f == 0x5400_0000 => Self::BranchEqual { by: signed(bits(5, 19), 19) * 4 },
            _ if word & 0xffe0_ffe0 == 0xaa00_03e0 => Self::Copy { to: register(0), from: register(16) },
            _ if word & 0xffff_fc1f == 0xd61f_0000 => Self::Jump { to: register(5) },
            _ => return None,
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
