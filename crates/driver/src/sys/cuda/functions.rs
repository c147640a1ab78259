//! Functions of modules and the limits of contexts, by functions that older drivers lack.

use std::{
    ffi::{CStr, c_char, c_int},
    ptr,
};

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use super::library::{NAMES, ctx_get_id, get_graph_mem_attribute, load};
use crate::{error::Error, sys::dl};

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`
const LOCAL_SIZE_BYTES: u32 = 3;

type GetAttribute = unsafe extern "C" fn(*mut c_int, u32, u64) -> u32;
type GetKernelAttribute = unsafe extern "C" fn(*mut c_int, u32, u64, c_int) -> u32;
type GetName = unsafe extern "C" fn(*mut *const c_char, u64) -> u32;
type GetHandle = unsafe extern "C" fn(*mut u64, u64) -> u32;
type GetLimit = unsafe extern "C" fn(*mut usize, u32) -> u32;

/// The driver's functions that are used here. Older drivers lack some of them.
struct Functions {
    attribute: Option<GetAttribute>,
    attribute_of_kernel: Option<GetKernelAttribute>,
    name: Option<GetName>,
    name_of_kernel: Option<GetName>,
    module: Option<GetHandle>,
    library_of_kernel: Option<GetHandle>,
    limit: Option<GetLimit>,
    #[cfg(feature = "dry")]
    load: Option<unsafe extern "C" fn(u64) -> u32>,
    #[cfg(feature = "dry")]
    function_of_kernel: Option<GetHandle>,
}

fn functions() -> &'static Functions {
    static FOUND: OnceCell<Functions> = OnceCell::new();
    // SAFETY: the symbols are functions of the driver with these signatures. A `CUfunction`, a `CUkernel`, a `CUmodule` and a `CUlibrary` are
    // pointers, which are passed like words.
    FOUND.get_or_init(|| unsafe {
        Functions {
            attribute: dl::symbol(NAMES, c"cuFuncGetAttribute"),
            attribute_of_kernel: dl::symbol(NAMES, c"cuKernelGetAttribute"),
            name: dl::symbol(NAMES, c"cuFuncGetName"),
            name_of_kernel: dl::symbol(NAMES, c"cuKernelGetName"),
            module: dl::symbol(NAMES, c"cuFuncGetModule"),
            library_of_kernel: dl::symbol(NAMES, c"cuKernelGetLibrary"),
            limit: dl::symbol(NAMES, c"cuCtxGetLimit"),
            #[cfg(feature = "dry")]
            load: dl::symbol(NAMES, c"cuFuncLoad"),
            #[cfg(feature = "dry")]
            function_of_kernel: dl::symbol(NAMES, c"cuKernelGetFunction"),
        }
    })
}

/// Loads the driver and looks up the functions that older drivers lack. Hooks must not do this, because it takes the loader's lock.
pub(crate) fn load_for_hooks() -> Result<(), Error> {
    load()?;
    ctx_get_id();
    get_graph_mem_attribute();
    functions();
    Ok(())
}

/// A function that a program has launched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadedFunction {
    /// The name without its arguments.
    pub(crate) name: Option<String>,
    /// The bytes of local memory that each thread needs.
    pub(crate) local_bytes: u64,
    /// The handle of its module or of its library.
    pub(crate) module: Option<u64>,
}

/// Returns what the driver knows about a function that was just launched: a `CUfunction`, or a `CUkernel`, which launches accept as well.
#[doc(alias("cuFuncGetAttribute", "cuFuncGetName", "cuFuncGetModule"))]
pub(crate) fn loaded_function(function: u64, ordinal: u32) -> LoadedFunction {
    let Functions { attribute, attribute_of_kernel, name, name_of_kernel, module, library_of_kernel, .. } = functions();
    let handle = |get: &Option<GetHandle>| {
        let mut handle = 0;
        // SAFETY: the driver checks the handle, which the program has just launched. The out-parameter is live.
        get.filter(|get| unsafe { get(&raw mut handle, function) } == 0).map(|_| handle)
    };
    let library = handle(library_of_kernel);
    let mut local = 0;
    let is_read = match (library, attribute, attribute_of_kernel) {
        // SAFETY: as above.
        (Some(_), _, Some(get)) => unsafe {
            get(&raw mut local, LOCAL_SIZE_BYTES, function, ordinal.cast_signed()) == 0
        },
        // SAFETY: as above.
        (_, Some(get), _) => unsafe { get(&raw mut local, LOCAL_SIZE_BYTES, function) == 0 },
        _ => false,
    };
    let mut text = ptr::null();
    let get_name = if library.is_some() { name_of_kernel } else { name };
    // SAFETY: as above.
    let is_named = get_name.is_some_and(|get| unsafe { get(&raw mut text, function) } == 0) && !text.is_null();
    // SAFETY: the driver has returned a C string, which lives as long as the function's module. The program cannot unload the module while
    // it launches a function of it.
    let name = is_named.then(|| kernel_name(&unsafe { CStr::from_ptr(text) }.to_string_lossy()));
    LoadedFunction {
        name,
        local_bytes: if is_read { u64::try_from(local).unwrap_or(0) } else { 0 },
        module: library.or_else(|| handle(module)),
    }
}

/// Loads a function, as its first launch would. The driver then takes the memory of its module.
#[cfg(feature = "dry")]
#[doc(alias("cuFuncLoad", "cuKernelGetFunction"))]
pub(crate) fn load_function(function: u64) {
    let Functions { load, function_of_kernel, .. } = functions();
    let mut handle = 0;
    // SAFETY: the driver checks the handle, which the program launches. The out-parameter is live.
    let is_kernel = function_of_kernel.is_some_and(|get| unsafe { get(&raw mut handle, function) } == 0);
    // SAFETY: as above.
    _ = load.map(|load| unsafe { load(if is_kernel { handle } else { function }) });
}

/// Returns the bytes of local memory that the current context has for each thread: `CU_LIMIT_STACK_SIZE`.
#[doc(alias = "cuCtxGetLimit")]
pub(crate) fn stack_limit() -> Option<u64> {
    const STACK_SIZE: u32 = 0;
    let mut bytes = 0;
    // SAFETY: the out-parameter is live.
    functions().limit.filter(|get| unsafe { get(&raw mut bytes, STACK_SIZE) } == 0).map(|_| bytes as u64)
}

/// Returns how many threads the device can run at once. Local memory is taken for each of them.
#[doc(alias("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR"))]
pub(crate) fn resident_threads(ordinal: u32) -> Option<u64> {
    use sys::CUdevice_attribute as Attribute;

    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the out-parameter is live. The driver returns an error for a number that is not a device.
        unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, ordinal.cast_signed()) }.result().ok()?;
        u64::try_from(value).ok()
    };
    let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    Some(processors * attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?)
}

/// Returns the name of a kernel without its arguments. The compiler of CUDA mangles names as C++ compilers do: `_Z` and the name with its
/// length, or `_ZN` and such a name for each namespace.
fn kernel_name(mangled: &str) -> String {
    let Some(mut rest) = mangled.strip_prefix("_Z") else { return mangled.to_owned() };
    // The arguments follow directly behind a name without a namespace.
    let most = if rest.starts_with('N') { usize::MAX } else { 1 };
    rest = rest.strip_prefix('N').unwrap_or(rest);
    let mut names = Vec::new();
    while names.len() < most {
        let digits = rest.len() - rest.trim_start_matches(|character: char| character.is_ascii_digit()).len();
        let name = rest[..digits].parse().ok().and_then(|length: usize| rest[digits..].get(..length));
        let Some(name) = name.filter(|name| !name.is_empty()) else { break };
        // A namespace without a name, which has another one in each file.
        names.push(if name.starts_with("_GLOBAL__N_") { "(anonymous)" } else { name });
        rest = &rest[digits + name.len()..];
    }
    if names.is_empty() { mangled.to_owned() } else { names.join("::") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kernels() {
        for (mangled, name) in [
            ("_Z4deepPii", "deep"),
            ("_Z4deepILi16384EEvPii", "deep"),
            ("_Z13ncclAllReduce24ncclDevKernelArgsStorageILm4096EE", "ncclAllReduce"),
            (
                "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEvi",
                "at::native::vectorized_elementwise_kernel",
            ),
            (
                "_ZN2at6native54_GLOBAL__N__e3cd1c1b_20_DistributionNormal_cu_0c5b6e8543normal",
                "at::native::(anonymous)",
            ),
            ("triton_poi_fused_0", "triton_poi_fused_0"),
            ("_Z", "_Z"),
            ("_Z99x", "_Z99x"),
            ("_Z99999999999999999999999x", "_Z99999999999999999999999x"),
            ("_Z2éa", "é"),
            ("_Z1é", "_Z1é"),
        ] {
            assert_eq!(kernel_name(mangled), name, "{mangled}");
        }
    }
}
