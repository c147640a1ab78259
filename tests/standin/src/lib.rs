//! A driver for the tests of gpumem on machines without one: `libcuda`, `libnvidia-ml` and `libcupti` in one shared object. Its GPUs use
//! the same model as gpumem's simulated device.
//!
//! The tests put it on the loader's path under NVIDIA's names, so that the real nvml-wrapper and cudarc run on it, and configure it with
//! environment variables, which `config.rs` lists.

// This crate provides a C ABI, and its functions keep NVIDIA's names.
#![allow(unsafe_code, non_snake_case)]

/// Exports NVIDIA's functions under their names. Each body runs as a `Call`, whose name it chooses, and returns the file's `ErrorCode`.
/// CUPTI's subscribers are called back before and after functions that have a callback id.
macro_rules! exports {
    ($($functions:tt)*) => { functions! { , unsafe(no_mangle); $($functions)* } };
}

/// Defines functions with this visibility (or none) and this attribute. Names with `|` between them are functions that do the same.
macro_rules! functions {
    ($visibility:vis, $attribute:meta; $(fn $($name:ident)|+ ($($argument:ident: $type:ty),*) |$call:ident| $body:block)*) => {
        /// The functions that can be made to fail.
        pub(crate) const FUNCTIONS: &[&str] = &[$($(stringify!($name)),+),*];

        /// The arguments of each function, one after the other as its header has them, as CUPTI passes them on.
        #[allow(dead_code, non_camel_case_types)]
        pub(crate) mod params {
            use super::*;
            $(each! { params [$($name)+] ($($argument: $type),*) {} })*
        }

        $(each! { function [$($name)+] ($($argument: $type),*) { $visibility, $attribute, $call, $body } })*
    };
}

/// Calls a macro for each of several names.
macro_rules! each {
    ($macro:ident [$($name:ident)+] $arguments:tt $rest:tt) => {
        $($macro! { $name $arguments $rest })+
    };
}

macro_rules! params {
    ($name:ident ($($argument:ident: $type:ty),*) {}) => {
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(super) $argument: $type),* }

        impl $name {
            pub(crate) const OFFSETS: &[usize] = &[$(std::mem::offset_of!(Self, $argument)),*];
        }
    };
}

macro_rules! function {
    ($name:ident ($($argument:ident: $type:ty),*) { $visibility:vis, $attribute:meta, $call:ident, $body:block }) => {
        #[$attribute]
        $visibility extern "C-unwind" fn $name($($argument: $type),*) -> std::ffi::c_int {
            const ID: Option<std::ffi::c_uint> = crate::callback_ids::id(stringify!($name));
            crate::driver::block(stringify!($name));
            let params = params::$name { $($argument),* };
            crate::cupti::announce(ID, concat!(stringify!($name), "\0"), &params, || {
                crate::driver::Call::run(stringify!($name), |$call| -> Result<(), ErrorCode> { $body })
            })
        }
    };
}

/// Converts the results of a library other than success: from and to the C code, and from a null pointer, which has the code `$null`.
macro_rules! error_codes {
    ($null:ident) => {
        impl From<::std::ffi::c_int> for ErrorCode {
            fn from(code: ::std::ffi::c_int) -> Self {
                Self(code)
            }
        }

        impl From<ErrorCode> for ::std::ffi::c_int {
            fn from(error: ErrorCode) -> Self {
                error.0
            }
        }

        impl From<$crate::ffi::NullPointer> for ErrorCode {
            fn from(_: $crate::ffi::NullPointer) -> Self {
                $null
            }
        }
    };
}

#[macro_use]
mod stubs;

mod callback_ids;
mod card;
mod config;
mod cuda;
mod cupti;
mod driver;
mod ffi;
#[cfg(target_arch = "x86_64")]
mod foreign;
mod graphs;
mod imports;
mod injection;
mod memory;
mod modules;
mod nvml;
mod objects;
mod pages;
mod physical;
mod program;
mod taken;
mod work;
