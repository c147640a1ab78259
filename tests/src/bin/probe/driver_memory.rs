//! A program for which the driver takes memory by itself, and the two figures of the driver. Both commands need the stand-in driver.
//!
//! - `driver_memory`: creates a context, loads a module, launches two of its functions, instantiates 200 graphs, frees what a pool then
//!   keeps, allocates a block and sets the limit of the stack. All of it stays as it is then;
//! - `took`: how much more KiB the device and this process have than at the `took` before, such as `2048 2048`. The first one answers with
//!   all that they have. The bytes of the process are `?` if NVML does not tell them.

use std::ffi::CStr;

use crate::Trouble;
use crate::raw::{self, Names};

/// The image of a module in the format of the stand-in driver: 6 MiB, and three functions; one takes 2 MiB if it is loaded later.
/// Each thread of `deep` needs 8 KiB of local memory.
static IMAGE: &CStr = c"module:6291456/flat:0:0/deep:2097152:8192/unused:2097152:0";

const MIB: u64 = 1 << 20;
const GRAPHS: usize = 200;
const NODES: usize = 10;

/// Runs `driver_memory`.
pub(crate) fn take_all(names: &Names) -> Result<String, Trouble> {
    let call = |line: &str| match names.call(line)? {
        0 => Ok(()),
        code => Err(Trouble::from(format!("{line}: {code}"))),
    };
    for line in ["cuInit 0", "cuDevicePrimaryCtxRetain &ctx 0", "cuCtxSetCurrent ctx", "cuStreamCreate &s 1"] {
        call(line)?;
    }
    call(&format!("cuModuleLoadData &m {}", IMAGE.as_ptr() as u64))?;
    for function in ["flat", "deep"] {
        call(&format!("cuModuleGetFunction &f m text:{function}"))?;
        call("cuLaunchKernel f 1 1 1 32 1 1 0 s 0 0")?;
    }
    for _ in 0..GRAPHS {
        call("cuGraphCreate &g 0")?;
        for _ in 0..NODES {
            call("cuGraphAddKernelNode &n g 0 0 zeros")?;
        }
        call("cuGraphInstantiateWithFlags &x g 0")?;
    }
    let kept = 3072 * MIB;
    names.set(&format!("kept {kept}"))?;
    for line in [
        "cuDeviceGetDefaultMemPool &p 0",
        "cuMemPoolSetAttribute p 4 &kept",
        &format!("cuMemAllocAsync &a {kept} s"),
        "cuMemFreeAsync a s",
        "cuStreamSynchronize s",
        &format!("cuMemAlloc_v2 &b {}", 3 * MIB),
        "cuCtxSetLimit 0 4096",
    ] {
        call(line)?;
    }
    Ok("done".to_owned())
}

/// The figures of the driver at the latest `took`, in bytes.
#[derive(Default)]
pub(crate) struct Figures {
    device: u64,
    process: u64,
}

impl Figures {
    /// Runs `took`.
    pub(crate) fn took(&mut self) -> Result<String, Trouble> {
        let (device, process) = raw::figures()?;
        let more = |now: u64, before: u64| (i128::from(now) - i128::from(before)) / 1024;
        let of_process = process.map_or_else(|| "?".to_owned(), |process| more(process, self.process).to_string());
        let answer = format!("{} {of_process}", more(device, self.device));
        *self = Self { device, process: process.unwrap_or(0) };
        Ok(answer)
    }
}
