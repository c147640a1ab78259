//! Writes small libraries that the loader searches before others. Each of their functions passes six arguments to
//! `gpumem_pass` of the injected library, and a text that names the function as the seventh.

use std::{io, ops::Range};

use object::{
    Endianness, elf,
    write::elf::{FileHeader, ProgramHeader, Rel, Sym, Writer},
};

/// The number of bytes of each function.
const FUNCTION: u64 = 16;
/// In memory, the part that the loader writes to is this many bytes behind its position in the file. No machine has
/// larger pages.
const PAGE: u64 = 1 << 16;

#[cfg(target_arch = "x86_64")]
const MACHINE: (elf::Machine, elf::RelocationType) = (elf::EM_X86_64, elf::R_X86_64_GLOB_DAT);
#[cfg(not(target_arch = "x86_64"))]
const MACHINE: (elf::Machine, elf::RelocationType) = (elf::EM_AARCH64, elf::R_AARCH64_GLOB_DAT);

/// A library whose functions pass their arguments to `gpumem_pass`.
pub(super) struct ForwardingLibrary<'a> {
    /// The name of the library.
    pub(super) name: &'a str,
    /// The libraries that this one depends on. The first one contains `gpumem_pass`.
    pub(super) needed: &'a [&'a [u8]],
    /// The names of its functions, each with the text that is passed on.
    pub(super) functions: &'a [(&'a str, Vec<u8>)],
}

impl ForwardingLibrary<'_> {
    /// Returns the contents of the file: the part that the loader only reads, with the functions, followed by the part
    /// that it writes.
    pub(super) fn image(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).map_err(io::Error::other)?;
        Ok(bytes)
    }

    fn write(&self, bytes: &mut Vec<u8>) -> object::write::Result<()> {
        let mut out = Writer::new(Endianness::Little, true, bytes);
        // Everything is reserved first, because the parts refer to each other.
        let imported = out.add_dynamic_string(b"gpumem_pass");
        let own = out.add_dynamic_string(self.name.as_bytes());
        let needed: Vec<_> = self.needed.iter().map(|path| out.add_dynamic_string(path)).collect();
        let names: Vec<_> = self.functions.iter().map(|(name, _)| out.add_dynamic_string(name.as_bytes())).collect();
        out.reserve_file_header();
        out.reserve_program_headers(4);
        out.reserve_null_section_index();
        out.reserve_dynsym_section_index();
        out.reserve_hash_section_index();
        out.reserve_dynstr_section_index();
        out.reserve_dynamic_section_index();
        out.reserve_shstrtab_section_index();
        out.reserve_null_dynamic_symbol_index();
        for _ in 0..=names.len() {
            out.reserve_dynamic_symbol_index();
        }
        let (symbols, symbol_count) = (out.reserve_dynsym(), out.dynamic_symbol_count());
        let (hash, relocation, strings) =
            (out.reserve_hash(1, symbol_count), out.reserve_relocations(1, true), out.reserve_dynstr()?);
        let code = out.reserve(FUNCTION * names.len() as u64, FUNCTION);
        let texts: Vec<_> = self.functions.iter().map(|(_, text)| out.reserve(text.len() as u64 + 1, 1)).collect();
        let slot = out.reserve(8, 16);
        let pointer = slot + PAGE;
        let own_entries = [
            (elf::DT_HASH, hash),
            (elf::DT_SYMTAB, symbols),
            (elf::DT_SYMENT, 24),
            (elf::DT_STRTAB, strings),
            (elf::DT_STRSZ, out.dynstr_len().into()),
            (elf::DT_RELA, relocation),
            (elf::DT_RELASZ, 24),
            (elf::DT_RELAENT, 24),
            // Never unload: code of the injected library may be running on any thread.
            (elf::DT_FLAGS_1, elf::DF_1_NODELETE.0),
            (elf::DT_NULL, 0),
        ];
        let dynamic = out.reserve_dynamic(needed.len() + 1 + own_entries.len());
        let end = out.reserved_len();
        out.reserve_shstrtab()?;
        out.reserve_section_headers();

        write_headers(&mut out, slot, dynamic..end)?;
        out.write_null_dynamic_symbol();
        let function = |name, address: Option<u64>| Sym {
            // Any section but 0 means that the symbol is defined in this file.
            section: address.map(|_| 1),
            st_name: name,
            st_info: elf::SymbolInfo::new(elf::STB_GLOBAL, elf::STT_FUNC),
            st_other: elf::SymbolOther(0),
            st_shndx: elf::SHN_UNDEF,
            st_value: address.unwrap_or(0),
            st_size: address.map_or(0, |_| FUNCTION),
        };
        out.write_dynamic_symbol(&function(out.dynamic_string_offset(Some(imported)), None));
        let addresses = (code..).step_by(16);
        for (name, address) in names.iter().zip(addresses.clone()) {
            out.write_dynamic_symbol(&function(out.dynamic_string_offset(Some(*name)), Some(address)));
        }
        out.write_hash(1, symbol_count, |symbol| (symbol > 0).then_some(0));
        out.write_align_relocation();
        out.write_relocation(true, &Rel { r_offset: pointer, r_sym: 1, r_type: MACHINE.1, r_addend: 0 });
        out.write_dynstr();
        out.write_align(FUNCTION);
        for (text, here) in texts.iter().zip(addresses) {
            out.write(&function_at(here, *text, pointer));
        }
        for (_, text) in self.functions {
            out.write(text);
            out.write(&[0]);
        }
        out.pad_until(slot + 8);
        out.write_align_dynamic();
        for (tag, text) in needed.into_iter().map(|path| (elf::DT_NEEDED, path)).chain([(elf::DT_SONAME, own)]) {
            out.write_dynamic_string(tag, text)?;
        }
        own_entries.into_iter().try_for_each(|(tag, value)| out.write_dynamic(tag, value))?;
        out.write_shstrtab();
        out.write_null_section_header();
        out.write_dynsym_section_header(symbols, 1);
        out.write_hash_section_header(hash);
        out.write_dynstr_section_header(strings);
        out.write_dynamic_section_header(dynamic + PAGE);
        out.write_shstrtab_section_header();
        Ok(())
    }
}

/// Writes the headers, which the loader reads first. The part that it writes to starts at `slot` in the file, and ends with `dynamic`.
fn write_headers(out: &mut Writer<'_>, slot: u64, dynamic: Range<u64>) -> object::write::Result<()> {
    out.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: MACHINE.0,
        e_entry: 0,
        e_flags: elf::FileFlags(0),
    })?;
    out.write_align_program_headers();
    for (p_type, p_flags, start, end, offset) in [
        (elf::PT_LOAD, elf::PF_R | elf::PF_X, 0, slot, 0),
        (elf::PT_LOAD, elf::PF_R | elf::PF_W, slot, dynamic.end, PAGE),
        (elf::PT_DYNAMIC, elf::PF_R | elf::PF_W, dynamic.start, dynamic.end, PAGE),
        // The stack is not executable.
        (elf::PT_GNU_STACK, elf::PF_R | elf::PF_W, 0, 0, 0),
    ] {
        let (p_vaddr, bytes) = (start + offset, end - start);
        out.write_program_header(&ProgramHeader {
            p_type,
            p_flags,
            p_offset: start,
            p_vaddr,
            p_paddr: p_vaddr,
            p_filesz: bytes,
            p_memsz: bytes,
            p_align: PAGE,
        });
    }
    Ok(())
}

/// Returns code that calls the function at `pointer` with the caller's six arguments, and with `text` as the seventh.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_possible_truncation, reason = "it is a small file")]
fn function_at(here: u64, text: u64, pointer: u64) -> [u8; FUNCTION as usize] {
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
fn function_at(here: u64, text: u64, pointer: u64) -> [u8; FUNCTION as usize] {
    // `adr x6, text; ldr x16, pointer; br x16; udf`
    let (text, pointer) = ((text - here) as u32, (pointer - here - 4) as u32);
    let code = [0x1000_0006 | (text & 3) << 29 | (text >> 2) << 5, 0x5800_0010 | (pointer >> 2) << 5, 0xd61f_0200, 0];
    std::array::from_fn(|at| code[at / 4].to_le_bytes()[at % 4])
}
