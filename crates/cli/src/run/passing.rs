//! Writes small libraries that the loader searches before others. Each of their functions passes six arguments to
//! `gpumem_pass` of the injected library, and a text that names the function as the seventh.

use object::elf;

const EHDR: usize = 64;
const PHDR: usize = 56;
const SYMBOL: usize = 24;
/// The number of bytes of each function.
const FUNCTION: usize = 16;
/// In memory, the part that the loader writes to is this many bytes behind its position in the file. No machine has
/// larger pages.
const PAGE: usize = 1 << 16;

/// A library whose functions pass their arguments to `gpumem_pass`.
pub(super) struct Passing<'a> {
    /// The name of the library.
    pub(super) name: &'a str,
    /// The libraries that this one depends on. The first one contains `gpumem_pass`.
    pub(super) needed: &'a [&'a [u8]],
    /// The names of its functions, each with the text that is passed on.
    pub(super) functions: &'a [(&'a str, Vec<u8>)],
}

impl Passing<'_> {
    /// Returns the contents of the file: the part that the loader only reads, with the functions, followed by the part
    /// that it writes.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is a small file")]
    pub(super) fn image(&self) -> Vec<u8> {
        // The texts: names of symbols and libraries, and the texts that are passed on.
        let mut texts = vec![0];
        let mut text = |text: &[u8]| {
            let start = texts.len();
            texts.extend(text);
            texts.push(0);
            start
        };
        let imported = text(b"gpumem_pass");
        let names: Vec<_> = self.functions.iter().map(|(name, _)| text(name.as_bytes())).collect();
        let told: Vec<_> = self.functions.iter().map(|(_, told)| text(told)).collect();
        let (own, needed): (_, Vec<_>) =
            (text(self.name.as_bytes()), self.needed.iter().map(|path| (elf::DT_NEEDED, text(path))).collect());

        // The position in the file at which each part starts.
        let symbols = EHDR + 4 * PHDR;
        let hash = symbols + (2 + names.len()) * SYMBOL;
        let relocation = (hash + (2 + 1 + 2 + names.len()) * 4).next_multiple_of(8);
        let code = (relocation + 24).next_multiple_of(FUNCTION);
        let strings = code + names.len() * FUNCTION;
        let written = (strings + texts.len()).next_multiple_of(16);
        let (pointer, dynamic) = (written + PAGE, written + 16);
        let own_entries = [
            (elf::DT_SONAME, own),
            (elf::DT_HASH, hash),
            (elf::DT_SYMTAB, symbols),
            (elf::DT_SYMENT, SYMBOL),
            (elf::DT_STRTAB, strings),
            (elf::DT_STRSZ, texts.len()),
            (elf::DT_RELA, relocation),
            (elf::DT_RELASZ, 24),
            (elf::DT_RELAENT, 24),
            // Never unload: code of the injected library may be running on any thread.
            (elf::DT_FLAGS_1, elf::DF_1_NODELETE.0 as usize),
            (elf::DT_NULL, 0),
        ];
        let entries = [&*needed, &own_entries].concat();
        let end = dynamic + entries.len() * 16;

        let mut out = Image(Vec::new());
        out.0.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        let (machine, kind) = if cfg!(target_arch = "x86_64") {
            (elf::EM_X86_64, elf::R_X86_64_GLOB_DAT)
        } else {
            (elf::EM_AARCH64, elf::R_AARCH64_GLOB_DAT)
        };
        out.halves([elf::ET_DYN.0, machine.0]);
        out.ints([1]);
        out.words([0, EHDR, 0]);
        out.ints([0]);
        out.halves([EHDR as u16, PHDR as u16, 4, 64, 0, 0]);
        for (kind, flags, start, end, offset) in [
            (elf::PT_LOAD, elf::PF_R | elf::PF_X, 0, written, 0),
            (elf::PT_LOAD, elf::PF_R | elf::PF_W, written, end, PAGE),
            (elf::PT_DYNAMIC, elf::PF_R | elf::PF_W, dynamic, end, PAGE),
            // The stack is not executable.
            (elf::PT_GNU_STACK, elf::PF_R | elf::PF_W, 0, 0, 0),
        ] {
            out.ints([kind.0, flags.0]);
            out.words([start, start + offset, start + offset, end - start, end - start, PAGE]);
        }
        // The first symbol means "none". The second one is not defined in this file.
        out.words([0, 0, 0]);
        let function = u32::from(elf::STB_GLOBAL.0 << 4 | elf::STT_FUNC.0);
        out.ints([imported as u32, function]);
        out.words([0, 0]);
        for (at, name) in names.iter().enumerate() {
            out.ints([*name as u32, function | 1 << 16]);
            out.words([code + at * FUNCTION, FUNCTION]);
        }
        // All symbols are in one list of the hash table.
        let count = 2 + names.len() as u32;
        out.ints([1, count, 1, 0]);
        out.ints((2..=count).map(|next| next % count));
        out.fill(relocation);
        out.words([pointer, 1 << 32 | kind.0 as usize, 0]);
        out.fill(code);
        for (at, told) in told.iter().enumerate() {
            let here = code + at * FUNCTION;
            out.0.extend_from_slice(&function_at(here, strings + told, pointer));
        }
        out.0.extend_from_slice(&texts);
        out.fill(dynamic);
        for (tag, value) in entries {
            out.words([tag.0 as usize, value]);
        }
        out.0
    }
}

/// Returns code that calls the function at `pointer` with the caller's six arguments, and with `text` as the seventh.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_possible_truncation, reason = "it is a small file")]
fn function_at(here: usize, text: usize, pointer: usize) -> [u8; FUNCTION] {
    // `lea rax, [text]; push rax; call [pointer]; pop rcx; ret`
    let mut code = *b"\x48\x8d\x05    \x50\xff\x15    \x59\xc3";
    code[3..7].copy_from_slice(&((text - here - 7) as u32).to_le_bytes());
    code[10..14].copy_from_slice(&((pointer - here - 14) as u32).to_le_bytes());
    code
}

/// Returns code that jumps to the function at `pointer` with the caller's six arguments, and with `text` as the
/// seventh.
#[cfg(not(target_arch = "x86_64"))]
#[allow(clippy::cast_possible_truncation, reason = "it is a small file")]
fn function_at(here: usize, text: usize, pointer: usize) -> [u8; FUNCTION] {
    // `adr x6, text; ldr x16, pointer; br x16; udf`
    let (text, pointer) = ((text - here) as u32, (pointer - here - 4) as u32);
    let code = [0x1000_0006 | (text & 3) << 29 | (text >> 2) << 5, 0x5800_0010 | (pointer >> 2) << 5, 0xd61f_0200, 0];
    std::array::from_fn(|at| code[at / 4].to_le_bytes()[at % 4])
}

/// A file with numbers in the byte order of the machine.
struct Image(Vec<u8>);

impl Image {
    fn halves(&mut self, values: impl IntoIterator<Item = u16>) {
        self.0.extend(values.into_iter().flat_map(u16::to_le_bytes));
    }

    fn ints(&mut self, values: impl IntoIterator<Item = u32>) {
        self.0.extend(values.into_iter().flat_map(u32::to_le_bytes));
    }

    fn words(&mut self, values: impl IntoIterator<Item = usize>) {
        self.0.extend(values.into_iter().flat_map(usize::to_le_bytes));
    }

    fn fill(&mut self, end: usize) {
        self.0.resize(end, 0);
    }
}
