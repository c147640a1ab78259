//! A driver for the tests of gpumem, where there is none: `libcuda` and `libnvidia-ml` in one shared object, with cards
//! that are the same model as gpumem's simulated device.
//!
//! The tests put it on the loader's path under NVIDIA's names, so that the real nvml-wrapper and cudarc run on it, and
//! tell it by its environment what to be like and what to fail at; `config.rs` lists all that it understands.

// The C ABI is what this crate is for, and its functions keep NVIDIA's names.
#![allow(unsafe_code, non_snake_case)]

/// Exports functions of NVIDIA's under their names. Each body runs as a `Call`, which it names,
/// and returns the file's `Refusal`.
macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $type:ty),*) |$call:ident| $body:block)*) => {
        /// The functions that can be made to fail.
        pub(crate) const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
                crate::driver::Call::run(stringify!($name), |$call| -> Result<(), Refusal> { $body })
            }
        )*
    };
}

mod config;
mod cuda;
#[allow(dead_code)] // The simulated device uses all of it, the stand-in driver most.
#[path = "../../../gpumem/src/source/device_model.rs"]
mod device_model;
mod driver;
mod ffi;
mod nvml;

/// How many contexts were created since the driver was loaded.
#[unsafe(no_mangle)]
extern "C" fn standin_contexts_created() -> u32 {
    driver::driver().contexts_created.load(std::sync::atomic::Ordering::Relaxed)
}
