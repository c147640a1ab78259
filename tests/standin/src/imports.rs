//! `libcuda`: memory of another process or API that a program opens here. It takes no memory of a GPU here, because it counts for the
//! process that allocated it.

use std::ffi::{c_int, c_uint};

use crate::cuda::{Address, ErrorCode, Handle, INVALID_VALUE, context, ready, stream_card};
use crate::driver::{Call, lock};
use crate::ffi::Out;
use crate::objects::{Imported, Objects};
use crate::physical::GRANULARITY;

const EXTERNAL: Handle = 0x4200_0000;
const IMPORTED_POOLS: Handle = 0x2200_0000;
/// The start of addresses that belong to no GPU.
const IMPORTED: Address = 0x4000_0000_0000;

/// Frees imported memory. Returns whether the address belongs to imported memory.
pub(crate) fn free(call: &Call, address: Address) -> bool {
    lock(&call.driver.objects).imported.remove(&address).is_some()
}

fn import(objects: &mut Objects, pool: Handle, context: Handle) -> Address {
    let end = objects.imported.last_key_value().map_or(IMPORTED, |(start, imported)| start + imported.bytes);
    objects.imported.insert(end, Imported { bytes: GRANULARITY, pool, context });
    objects.number(end);
    end
}

fn opened(call: &Call, address: Out<Address>) -> Result<(), ErrorCode> {
    let (context, _, _) = context(call)?;
    Ok(address.put(import(&mut lock(&call.driver.objects), 0, context))?)
}

dispatched! { calls;
    fn cuMemExportToShareableHandle(exported: Out<c_int>, handle: u64, kind: c_int, flags: u64) |call| {
        ready(call)?;
        let is_there = usize::try_from(handle).is_ok_and(|handle| lock(&call.driver.objects).physical.contains_key(&handle));
        if !is_there || kind != 1 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        Ok(exported.put(77)?)
    }

    fn cuMemImportFromShareableHandle(handle: Out<u64>, exported: usize, kind: c_int) |call| {
        ready(call)?;
        if exported == 0 || kind != 1 {
            return Err(INVALID_VALUE);
        }
        Ok(handle.put(lock(&call.driver.objects).add_physical(None, GRANULARITY))?)
    }

    fn cuMulticastCreate(handle: Out<u64>, properties: Out<u8>) |call| {
        ready(call)?;
        if properties.is_null() {
            return Err(INVALID_VALUE);
        }
        Ok(handle.put(lock(&call.driver.objects).add_physical(None, GRANULARITY))?)
    }

    fn cuMemPoolImportFromShareableHandle(pool: Out<Handle>, exported: usize, kind: c_int, flags: u64) |call| {
        ready(call)?;
        if exported == 0 || kind != 1 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        Ok(pool.put(IMPORTED_POOLS)?)
    }

    fn cuMemPoolImportPointer(address: Out<Address>, pool: Handle, exported: Out<u8>) |call| {
        ready(call)?;
        if pool != IMPORTED_POOLS || exported.is_null() {
            return Err(INVALID_VALUE);
        }
        Ok(address.put(import(&mut lock(&call.driver.objects), pool, 0))?)
    }

    fn cuIpcCloseMemHandle(address: Address) |call| {
        ready(call)?;
        if free(call, address) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuImportExternalMemory(external: Out<Handle>, described: Out<u8>) |call| {
        stream_card(call, 0)?;
        if described.is_null() {
            return Err(INVALID_VALUE);
        }
        Ok(external.put(EXTERNAL)?)
    }

    fn cuExternalMemoryGetMappedBuffer(address: Out<Address>, external: Handle, described: Out<u8>) |call| {
        if external != EXTERNAL || described.is_null() {
            return Err(INVALID_VALUE);
        }
        opened(call, address)
    }

    fn cuDestroyExternalMemory(external: Handle) |call| {
        ready(call)?;
        if external == EXTERNAL { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

/// NVIDIA's `cuIpcOpenMemHandle_v2`, without its second argument, for the scripts of the tests: a struct of 64 bytes is not passed in a
/// register.
#[unsafe(no_mangle)]
extern "C" fn standin_ipc_open(address: Out<Address>, _flags: c_uint) -> c_int {
    Call::run("standin_ipc_open", |call| opened(call, address))
}
