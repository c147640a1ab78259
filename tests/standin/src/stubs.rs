//! The exports of `libcuda`: a stub for each function, which goes through a separate pointer for each function (its slot).
//!
//! NVIDIA's drivers since 470 are built like this, and gpumem finds the slots by these bytes. There are two forms: up to driver 555, a stub
//! jumps; in driver 580, it calls. The tests change the bytes in a copy of the file to get drivers that gpumem must reject.

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicPtr, AtomicU32};

/// The place where a stub finds the address of its function. It is in data that stays writable, because its type is `AtomicPtr`.
#[cfg(target_arch = "x86_64")]
pub(crate) type Slot = AtomicPtr<()>;

/// The word that every stub reads first: a real driver sets it to 0x321cba00 when the process ends, and then its functions fail. It stays 0
/// here.
#[cfg(target_arch = "x86_64")]
pub(crate) static STATE: AtomicU32 = AtomicU32::new(0);

/// A slot that is not used, in data that becomes read-only after relocation, because it does not change.
///
/// The tests make it the slot of a function: they change the stub to use this slot, and the relocation of this slot to point to the
/// function.
#[unsafe(no_mangle)]
static standin_relro_slot: extern "C" fn() = nobody;

/// This is not a symbol of the file, so the relocation is of the kind that slots have.
extern "C" fn nobody() {}

/// Exports functions of libcuda's: `exports!`, each behind a stub of this form.
#[cfg(target_arch = "x86_64")]
macro_rules! dispatched {
    ($form:ident; $(fn $($name:ident)|+ ($($argument:ident: $type:ty),*) |$call:ident| $body:block)*) => {
        mod implementations {
            #[allow(clippy::wildcard_imports)] // The bodies see what they would see one level up.
            use super::*;

            functions! {
                pub(super), doc = "What the slot points at.";
                $(fn $($name)|+ ($($argument: $type),*) |$call| $body)*
            }
        }

        #[allow(unused_imports)] // CUPTI does not tell its subscribers of all calls.
        pub(crate) use implementations::{FUNCTIONS, params};

        #[allow(non_upper_case_globals)]
        mod slots {
            use super::implementations;
            use crate::stubs::Slot;

            $($(pub(super) static $name: Slot = Slot::new((implementations::$name as *const ()).cast_mut());)+)*
        }

        /// The slots, by function name.
        pub(crate) const SLOTS: &[(&str, &crate::stubs::Slot)] = &[$($((stringify!($name), &slots::$name)),+),*];

        $(each! { $form [$($name)+] ($($argument: $type),*) {} })*
    };
}

/// On other processors the functions are exported directly, because the exact bytes of their stubs are not known.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! dispatched {
    ($form:ident; $($functions:tt)*) => {
        exports! { $($functions)* }

    };
}

/// Drivers 470 to 555. The arguments stay where they are, and the function returns to the stub's caller. `CUDA_ERROR_DEINITIALIZED` is 4,
/// and 0x321cba00 is the value that the driver writes when it is deinitialised.
#[cfg(target_arch = "x86_64")]
macro_rules! jumps {
    ($name:ident ($($argument:ident: $type:ty),*) {}) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "cmp dword ptr [rip + {state}], 0x321cba00",
                "je 2f",
                "jmp qword ptr [rip + {slot}]",
                "2:",
                "mov eax, 4",
                "ret",
                ".cfi_endproc",
                state = sym crate::stubs::STATE,
                slot = sym slots::$name,
            )
        }
    };
}

/// Driver 580. The stub checks the result, because some failures are logged. The function could not find arguments on the stack, so it must
/// not have any.
#[cfg(target_arch = "x86_64")]
macro_rules! calls {
    ($name:ident ($($argument:ident: $type:ty),*) {}) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "push rbp",
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rsp",
                ".cfi_def_cfa_register rbp",
                "push r12",
                ".cfi_offset r12, -24",
                "sub rsp, 8",
                "cmp dword ptr [rip + {state}], 0x321cba00",
                // `je 4f` with 32 bits of distance, because the assembler would choose 8.
                ".byte 0x0f, 0x84",
                ".long 4f - (. + 4)",
                "call qword ptr [rip + {slot}]",
                "mov r12d, eax",
                "test eax, eax",
                "je 2f",
                "cmp eax, 600",
                "je 2f",
                "lea eax, [rax - 3]",
                "cmp eax, 1",
                "ja 3f",
                "2:",
                ".cfi_remember_state",
                "mov eax, r12d",
                "mov r12, qword ptr [rbp - 8]",
                ".cfi_restore r12",
                "leave",
                ".cfi_restore rbp",
                ".cfi_def_cfa rsp, 8",
                "ret",
                ".cfi_restore_state",
                "nop",
                // Here, the driver writes to its log.
                "3:",
                "jmp 2b",
                "4:",
                "mov r12d, 4",
                "mov eax, r12d",
                "mov r12, qword ptr [rbp - 8]",
                ".cfi_restore r12",
                "leave",
                ".cfi_restore rbp",
                ".cfi_def_cfa rsp, 8",
                "ret",
                ".cfi_endproc",
                state = sym crate::stubs::STATE,
                slot = sym slots::$name,
            )
        }
    };
}
