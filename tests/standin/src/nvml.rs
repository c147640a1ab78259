//! `libnvidia-ml`: NVML sees every GPU, in its own order, regardless of `CUDA_VISIBLE_DEVICES`.

use std::ffi::{c_char, c_int, c_uint};
use std::process;
use std::sync::atomic::Ordering;

use crate::card::{Gpu, MemoryInfo};
use crate::config::{List, Processes};
use crate::cuda::bus_id;
use crate::driver::Call;
use crate::ffi::{Out, Text};

/// An `nvmlReturn_t` other than success.
struct ErrorCode(c_int);

const UNINITIALIZED: ErrorCode = ErrorCode(1);
const INVALID_ARGUMENT: ErrorCode = ErrorCode(2);
const NOT_FOUND: ErrorCode = ErrorCode(6);
const INSUFFICIENT_SIZE: ErrorCode = ErrorCode(7);
const ARGUMENT_VERSION_MISMATCH: ErrorCode = ErrorCode(25);

error_codes!(INVALID_ARGUMENT);

/// An `nvmlDevice_t`: 16 times the GPU's index plus one, and one more for the GPU's slice.
type Handle = usize;

fn handle(card: usize, slice: bool) -> Handle {
    (card + 1) * 16 + usize::from(slice)
}

fn ready(call: &Call) -> Result<(), ErrorCode> {
    match call.driver.nvml_users.load(Ordering::Relaxed) {
        0 => Err(UNINITIALIZED),
        _ => Ok(()),
    }
}

/// Returns the GPU of a handle, and whether the handle belongs to its slice.
fn device(call: &Call, device: Handle) -> Result<(&'static Gpu, bool), ErrorCode> {
    ready(call)?;
    let card = (device / 16).checked_sub(1).filter(|card| *card < call.driver.gpus.len()).ok_or(INVALID_ARGUMENT)?;
    let gpu = call.on(card)?;
    match device % 16 {
        0 => Ok((gpu, false)),
        1 if gpu.mig.is_some() => Ok((gpu, true)),
        _ => Err(INVALID_ARGUMENT),
    }
}

fn memory_info(call: &Call, of: Handle) -> Result<MemoryInfo, ErrorCode> {
    let (gpu, slice) = device(call, of)?;
    let info = gpu.memory().memory_info(slice);
    let max = MemoryInfo { total: u64::MAX, free: u64::MAX, used: u64::MAX, reserved: u64::MAX };
    Ok(if call.driver.config.figures_max { max } else { info })
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `NVML_STRUCT_VERSION(Memory, 2)`: the size, with the version in the upper bits.
const MEMORY_V2: c_uint = 0x0200_0028;
const _: () = assert!(size_of::<MemoryV2>() == 0x28);

/// `nvmlPciInfo_t`
#[derive(Clone, Copy)]
#[repr(C)]
struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    text: [u8; 32],
}

/// `nvmlAccountingStats_t`
#[derive(Clone, Copy)]
#[repr(C)]
struct AccountingStats {
    percent: [c_uint; 2],
    most: u64,
    times: [u64; 2],
    is_running: c_uint,
    reserved: [c_uint; 5],
}

/// Returns a C string that is padded with zeros.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    std::array::from_fn(|at| text.as_bytes().get(at).copied().unwrap_or(0))
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

/// The id of this process outside of its container: the highest one that Linux gives.
const ID_OUTSIDE: c_uint = (1 << 22) - 1;

/// Returns the processes on one of the lists. This process is on the list of compute processes, once it has a context.
fn processes(call: &Call, of: Handle, list: List) -> Result<Vec<ProcessInfo>, ErrorCode> {
    let (gpu, _) = device(call, of)?;
    let config = &call.driver.config;
    let mut memory = gpu.memory();
    let used = memory.used_by_process().filter(|_| list == List::Compute);
    let own = used.and_then(|used| match config.processes {
        Processes::Empty => None,
        Processes::Unavailable => Some((process::id(), NOT_AVAILABLE)),
        Processes::Renamed => Some((ID_OUTSIDE, used)),
        Processes::Own => Some((process::id(), used)),
    });
    let others = config.others.iter().filter(|other| other.list == list);
    let others = others.map(|other| (other.pid, other.used.unwrap_or(NOT_AVAILABLE)));
    let all = own.into_iter().chain(others);
    let info = |(pid, used)| ProcessInfo { pid, used, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX };
    Ok(all.map(info).collect())
}

/// Writes a list if the caller has room for it. Otherwise, returns an error and writes the number of entries.
fn put_processes(processes: &[ProcessInfo], count: Out<c_uint>, list: Out<ProcessInfo>) -> Result<(), ErrorCode> {
    let room = count.get()?;
    let needed = c_uint::try_from(processes.len()).unwrap_or(c_uint::MAX);
    count.put(needed)?;
    if room < needed {
        return Err(INSUFFICIENT_SIZE);
    }
    if !list.is_null() {
        list.put_all(processes)?;
    }
    Ok(())
}

exports! {
    fn nvmlInit_v2() |call| {
        call.driver.tear_down_at_exit();
        call.driver.nvml_users.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn nvmlShutdown() |call| {
        ready(call)?;
        call.driver.nvml_users.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) |call| {
        ready(call)?;
        Ok(version.put_text("580.159.01", length as usize)?)
    }

    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) |call| {
        ready(call)?;
        Ok(version.put_text("13.580.159.01", length as usize)?)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |call| {
        ready(call)?;
        Ok(version.put(13_000)?)
    }

    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) |call| {
        ready(call)?;
        Ok(count.put(c_uint::try_from(call.driver.gpus.len()).unwrap_or(c_uint::MAX))?)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, found: Out<Handle>) |call| {
        ready(call)?;
        let card = Some(index as usize).filter(|card| *card < call.driver.gpus.len()).ok_or(INVALID_ARGUMENT)?;
        call.on(card)?;
        Ok(found.put(handle(card, false))?)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, found: Out<Handle>) |call| {
        ready(call)?;
        let requested = uuid.get()?;
        let whole = |gpu: &Gpu| gpu.uuid.spelled("GPU-") == requested;
        let slice = |gpu: &Gpu| gpu.mig.is_some_and(|mig| mig.spelled("MIG-") == requested);
        let card = call.driver.gpus.iter().position(|gpu| whole(gpu) || slice(gpu)).ok_or(NOT_FOUND)?;
        let gpu = call.on(card)?;
        Ok(found.put(handle(card, slice(gpu)))?)
    }

    // The domain has eight digits in NVML's own texts.
    fn nvmlDeviceGetHandleByPciBusId_v2(text: Text, found: Out<Handle>) |call| {
        ready(call)?;
        let requested = text.get()?;
        let is_of = |card: &usize| [bus_id(*card), format!("0000{}", bus_id(*card))].contains(&requested);
        let card = (0..call.driver.gpus.len()).find(is_of).ok_or(NOT_FOUND)?;
        Ok(found.put(handle(card, false))?)
    }

    fn nvmlDeviceGetIndex(of: Handle, index: Out<c_uint>) |call| {
        device(call, of)?;
        Ok(index.put(c_uint::try_from(of / 16 - 1).unwrap_or(c_uint::MAX))?)
    }

    fn nvmlDeviceGetPciInfo_v3(of: Handle, info: Out<PciInfo>) |call| {
        device(call, of)?;
        let card = of / 16 - 1;
        let (legacy, text) = (padded(&bus_id(card)), padded(&format!("0000{}", bus_id(card))));
        let bus = c_uint::try_from(card + 1).unwrap_or(c_uint::MAX);
        info.put(PciInfo { legacy, domain: 0, bus, device: 0, ids: [0; 2], text })?;
        Ok(())
    }

    fn nvmlDeviceGetUUID(of: Handle, uuid: Out<c_char>, length: c_uint) |call| {
        let (gpu, slice) = device(call, of)?;
        let text = match gpu.mig {
            Some(mig) if slice => mig.spelled("MIG-"),
            _ => gpu.uuid.spelled("GPU-"),
        };
        if text.len() >= length as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        Ok(uuid.put_text(&text, length as usize)?)
    }

    fn nvmlDeviceGetName(of: Handle, name: Out<c_char>, length: c_uint) |call| {
        let (gpu, _) = device(call, of)?;
        if gpu.name.len() >= length as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        Ok(name.put_text(&gpu.name, length as usize)?)
    }

    fn nvmlDeviceGetMemoryInfo(of: Handle, memory: Out<MemoryV1>) |call| {
        let MemoryInfo { total, free, used, reserved } = memory_info(call, of)?;
        // The first version does not have `reserved` and counts it as used.
        Ok(memory.put(MemoryV1 { total, free, used: used.saturating_add(reserved) })?)
    }

    fn nvmlDeviceGetMemoryInfo_v2(of: Handle, memory: Out<MemoryV2>) |call| {
        let MemoryInfo { total, free, used, reserved } = memory_info(call, of)?;
        if memory.get()?.version != MEMORY_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        Ok(memory.put(MemoryV2 { version: MEMORY_V2, total, reserved, free, used })?)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3 | nvmlDeviceGetComputeRunningProcesses_v2(of: Handle, count: Out<c_uint>, list: Out<ProcessInfo>) |call| {
        put_processes(&processes(call, of, List::Compute)?, count, list)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3 | nvmlDeviceGetGraphicsRunningProcesses_v2(of: Handle, count: Out<c_uint>, list: Out<ProcessInfo>) |call| {
        put_processes(&processes(call, of, List::Graphics)?, count, list)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(of: Handle, count: Out<c_uint>, list: Out<ProcessInfo>) |call| {
        put_processes(&processes(call, of, List::Mps)?, count, list)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, length: c_uint) |call| {
        ready(call)?;
        let named = call.driver.config.others.iter().find(|other| other.pid == pid).map(|other| other.name.as_deref());
        let text = named.unwrap_or_else(|| (pid == process::id()).then_some("./probe --of-nvml")).ok_or(NOT_FOUND)?;
        Ok(name.put_text(text, length as usize)?)
    }

    fn nvmlDeviceGetAccountingMode(of: Handle, mode: Out<c_uint>) |call| {
        device(call, of)?;
        Ok(mode.put(c_uint::from(call.driver.config.accounted.is_some()))?)
    }

    // The peak is the same for each process.
    fn nvmlDeviceGetAccountingStats(of: Handle, _pid: c_uint, stats: Out<AccountingStats>) |call| {
        device(call, of)?;
        let most = call.driver.config.accounted.ok_or(NOT_FOUND)?;
        let not_available = c_uint::MAX;
        let percent = [not_available; 2];
        Ok(stats.put(AccountingStats { percent, most, times: [0; 2], is_running: 1, reserved: [0; 5] })?)
    }

    fn nvmlDeviceGetMigMode(of: Handle, current: Out<c_uint>, pending: Out<c_uint>) |call| {
        let (gpu, slice) = device(call, of)?;
        if slice {
            return Err(INVALID_ARGUMENT);
        }
        current.put(c_uint::from(gpu.mig.is_some()))?;
        Ok(pending.put(c_uint::from(gpu.mig.is_some()))?)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(of: Handle, count: Out<c_uint>) |call| {
        device(call, of)?;
        Ok(count.put(7)?)
    }

    // Index 1 is the GPU's slice. There is none at index 0.
    fn nvmlDeviceGetMigDeviceHandleByIndex(of: Handle, index: c_uint, found: Out<Handle>) |call| {
        let (gpu, _) = device(call, of)?;
        if index != 1 || gpu.mig.is_none() {
            return Err(NOT_FOUND);
        }
        Ok(found.put(of + 1)?)
    }
}

/// Sets the memory of other processes on a GPU, by NVML's index. Their entries in NVML's lists stay as they are.
#[unsafe(no_mangle)]
extern "C" fn standin_set_others(card: c_uint, bytes: u64) -> c_int {
    Call::run("standin_set_others", |call| {
        let gpu = call.driver.gpus.get(card as usize).ok_or(INVALID_ARGUMENT)?;
        gpu.memory().set_others(bytes).map_err(|_| INSUFFICIENT_SIZE)
    })
}
