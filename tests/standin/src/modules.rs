//! `libcuda`: modules and libraries, and their functions.
//!
//! An image is a text here: `module:6291456/add:0:0/deep:2097152:8192` needs 6 MiB for its first function that is loaded, whichever it is.
//! Its function `add` takes nothing and `deep` 2 MiB if it is loaded later, and each thread of `deep` needs 8 KiB of local memory.
//!
//! A function is loaded when the program gets it from a module or a kernel, or when it launches its kernel. The kernels of a library belong
//! to no context, and are loaded into each one that uses them.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::cuda::{Device, ErrorCode, Handle, INVALID_HANDLE, INVALID_VALUE, context, device, ready};
use crate::driver::{Call, lock};
use crate::ffi::{Out, Text};
use crate::objects::Objects;
use crate::taken::{self, Purpose};

fn invalid_image() -> ErrorCode {
    200.into()
}

fn not_found() -> ErrorCode {
    500.into()
}

/// The handles of a module: its own, and from the first one on those of its functions. The kernels of a library come before its functions.
const MODULES: Handle = 0x7000_0000;
const SPAN: Handle = 1 << 12;
const FIRST_KERNEL: Handle = 1;
const FIRST_FUNCTION: Handle = SPAN / 2;

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`, and the number of attributes.
const LOCAL_SIZE: c_int = 3;
const ATTRIBUTES: c_int = 16;

/// A `CUmodule` or a `CUlibrary`.
#[derive(Debug)]
pub(crate) struct Module {
    image: Image,
    /// The context that contains it; `None` for a library.
    context: Option<Handle>,
    /// The functions that are loaded in each context, by their place in the image.
    loaded: BTreeMap<Handle, Vec<usize>>,
}

#[derive(Debug, Clone)]
struct Image {
    bytes: u64,
    functions: Vec<Function>,
}

#[derive(Debug, Clone)]
struct Function {
    name: CString,
    /// The bytes that it takes if it is not the first.
    bytes: u64,
    /// The bytes of local memory of each thread.
    local: u64,
}

impl Image {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix("module:")?.split('/');
        let bytes = parts.next()?.parse().ok()?;
        let functions = parts.map(|part| {
            let [name, bytes, local] = part.split(':').collect::<Vec<_>>()[..] else { return None };
            Some(Function { name: CString::new(name).ok()?, bytes: bytes.parse().ok()?, local: local.parse().ok()? })
        });
        Some(Self { bytes, functions: functions.collect::<Option<_>>()? })
    }

    /// Returns the bytes that these functions take in a context.
    fn bytes_of(&self, loaded: &[usize]) -> u64 {
        match loaded {
            [] => 0,
            [_, later @ ..] => self.bytes + later.iter().map(|at| self.functions[*at].bytes).sum::<u64>(),
        }
    }
}

impl Objects {
    /// Returns the module of a handle, if it is of the requested sort.
    fn module(&self, handle: Handle, is_library: bool) -> Result<&Module, ErrorCode> {
        self.modules.get(&handle).filter(|module| module.context.is_none() == is_library).ok_or(INVALID_HANDLE)
    }

    /// Returns the handle and the place in the image of a function (`FIRST_FUNCTION`) or of a kernel (`FIRST_KERNEL`).
    fn found(&self, handle: Handle, first: Handle) -> Option<(Handle, usize)> {
        let (module, at) = (handle - handle % SPAN, (handle % SPAN).checked_sub(first)?);
        self.modules.get(&module)?.image.functions.get(at)?;
        Some((module, at))
    }

    fn function(&self, (module, at): (Handle, usize)) -> &Function {
        &self.modules[&module].image.functions[at]
    }
}

/// Removes the modules of a context that ends, and unloads its functions. Their memory is part of the context's.
pub(crate) fn end(objects: &mut Objects, context: Handle) {
    objects.modules.retain(|_, module| module.context != Some(context));
    for module in objects.modules.values_mut() {
        module.loaded.remove(&context);
    }
}

/// Takes the memory of all modules in a context.
fn settle(call: &Call, objects: &Objects, context: Handle) -> Result<(), ErrorCode> {
    let card = objects.context_card(context, call.driver.gpus.len()).ok_or(INVALID_HANDLE)?;
    let bytes = |module: &Module| module.loaded.get(&context).map_or(0, |loaded| module.image.bytes_of(loaded));
    let bytes = objects.modules.values().map(bytes).sum();
    taken::take(call, &call.driver.gpus[card], Purpose::Modules(context), bytes)
}

/// Loads functions of a module into a context.
fn load(
    call: &Call,
    objects: &mut Objects,
    module: Handle,
    functions: impl IntoIterator<Item = usize>,
    context: Handle,
) -> Result<(), ErrorCode> {
    let loaded = objects.modules.get_mut(&module).ok_or(INVALID_HANDLE)?.loaded.entry(context).or_default();
    let before = loaded.clone();
    for function in functions {
        if !loaded.contains(&function) {
            loaded.push(function);
        }
    }
    let outcome = settle(call, objects, context);
    if outcome.is_err()
        && let Some(module) = objects.modules.get_mut(&module)
    {
        module.loaded.insert(context, before);
    }
    outcome
}

/// Opens an image, for the current context or as a library, and returns its handle.
fn open(call: &Call, created: Out<Handle>, image: Text, is_library: bool) -> Result<(), ErrorCode> {
    ready(call)?;
    let current = context(call).map(|(context, ..)| context);
    let (owner, loads_into) = match current {
        Err(error) if !is_library => return Err(error),
        current => (current.as_ref().ok().copied().filter(|_| !is_library), current.ok()),
    };
    let image = Image::parse(&image.get()?).ok_or_else(invalid_image)?;
    if created.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut objects = lock(&call.driver.objects);
    let handle = (MODULES..).step_by(SPAN).find(|handle| !objects.modules.contains_key(handle)).unwrap_or(MODULES);
    let functions = 0..image.functions.len();
    objects.modules.insert(handle, Module { image, context: owner, loaded: BTreeMap::new() });
    if let (true, Some(context)) = (call.driver.config.eager, loads_into)
        && let Err(error) = load(call, &mut objects, handle, functions, context)
    {
        objects.modules.remove(&handle);
        return Err(error);
    }
    Ok(created.put(handle)?)
}

fn close(call: &Call, closed: Handle, is_library: bool) -> Result<(), ErrorCode> {
    ready(call)?;
    let mut objects = lock(&call.driver.objects);
    objects.module(closed, is_library)?;
    let contexts = objects.modules.remove(&closed).map(|module| module.loaded).unwrap_or_default();
    contexts.keys().try_for_each(|context| settle(call, &objects, *context))
}

/// Returns the handle of the function with this name.
fn named(objects: &Objects, module: Handle, is_library: bool, name: Text) -> Result<(Handle, usize), ErrorCode> {
    let (functions, name) = (&objects.module(module, is_library)?.image.functions, name.get()?);
    let at = functions.iter().position(|function| function.name.to_bytes() == name.as_bytes()).ok_or_else(not_found)?;
    Ok((module, at))
}

/// Loads what the launch of a function or a kernel needs. Functions that no module contains need nothing.
pub(crate) fn launch(call: &Call, launched: Handle) -> Result<(), ErrorCode> {
    let (current, _, gpu) = context(call)?;
    let mut objects = lock(&call.driver.objects);
    let found = objects.found(launched, FIRST_FUNCTION).or_else(|| objects.found(launched, FIRST_KERNEL));
    let Some((module, at)) = found else { return Ok(()) };
    if objects.modules[&module].context.is_some_and(|context| context != current) {
        return Err(INVALID_HANDLE);
    }
    load(call, &mut objects, module, [at], current)?;
    taken::by_launch(call, gpu, current, objects.function((module, at)).local)
}

/// Returns the name of a function or a kernel.
fn name(call: &Call, handle: Handle, first: Handle) -> Option<&'static CStr> {
    let objects = lock(&call.driver.objects);
    let found = objects.found(handle, first)?;
    Some(Box::leak(objects.function(found).name.clone().into_boxed_c_str()))
}

/// Returns the name of a function, if it belongs to a module. The text lives as long as the process.
pub(crate) fn function_name(call: &Call, function: Handle) -> Option<&'static CStr> {
    name(call, function, FIRST_FUNCTION)
}

pub(crate) fn is_kernel(call: &Call, handle: Handle) -> bool {
    name(call, handle, FIRST_KERNEL).is_some()
}

/// Returns the number of parameters of a function or a kernel, if it belongs to a module: 2 if its name is `add2`.
pub(crate) fn parameters(call: &Call, handle: Handle) -> Option<usize> {
    let name = name(call, handle, FIRST_FUNCTION).or_else(|| name(call, handle, FIRST_KERNEL))?.to_str().ok()?;
    Some(name.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap_or(0))
}

fn attribute(value: Out<c_int>, attribute: c_int, local: u64) -> Result<(), ErrorCode> {
    Ok(value.put(match attribute {
        LOCAL_SIZE => c_int::try_from(local).map_err(|_| INVALID_VALUE)?,
        0..ATTRIBUTES => 0,
        _ => return Err(INVALID_VALUE),
    })?)
}

dispatched! { jumps;
    fn cuModuleLoadData | cuModuleLoadFatBinary(created: Out<Handle>, image: Text) |call| {
        open(call, created, image, false)
    }

    fn cuModuleLoadDataEx(created: Out<Handle>, image: Text, _count: c_uint, _options: Out<c_void>, _values: Out<c_void>) |call| {
        open(call, created, image, false)
    }

    fn cuModuleUnload(module: Handle) |call| {
        close(call, module, false)
    }

    fn cuFuncLoad(function: Handle) |call| {
        let (context, _, _) = context(call)?;
        let mut objects = lock(&call.driver.objects);
        let (module, at) = objects.found(function, FIRST_FUNCTION).ok_or(INVALID_HANDLE)?;
        load(call, &mut objects, module, [at], context)
    }

    fn cuModuleGetFunction(found: Out<Handle>, module: Handle, name: Text) |call| {
        ready(call)?;
        let mut objects = lock(&call.driver.objects);
        let (module, at) = named(&objects, module, false, name)?;
        let context = objects.modules[&module].context.ok_or(INVALID_HANDLE)?;
        load(call, &mut objects, module, [at], context)?;
        Ok(found.put(module + FIRST_FUNCTION + at)?)
    }

    fn cuLibraryLoadData(created: Out<Handle>, image: Text, _options: Out<c_void>, _values: Out<c_void>, _count: c_uint,
        _library_options: Out<c_void>, _library_values: Out<c_void>, _library_count: c_uint) |call| {
        open(call, created, image, true)
    }

    fn cuLibraryUnload(library: Handle) |call| {
        close(call, library, true)
    }

    fn cuLibraryGetKernel(found: Out<Handle>, library: Handle, name: Text) |call| {
        ready(call)?;
        let (library, at) = named(&lock(&call.driver.objects), library, true, name)?;
        Ok(found.put(library + FIRST_KERNEL + at)?)
    }

    fn cuKernelGetFunction(found: Out<Handle>, kernel: Handle) |call| {
        let (context, _, _) = context(call)?;
        let mut objects = lock(&call.driver.objects);
        let (library, at) = objects.found(kernel, FIRST_KERNEL).ok_or(INVALID_HANDLE)?;
        load(call, &mut objects, library, [at], context)?;
        Ok(found.put(library + FIRST_FUNCTION + at)?)
    }

    fn cuKernelGetLibrary(found: Out<Handle>, kernel: Handle) |call| {
        ready(call)?;
        let (library, _) = lock(&call.driver.objects).found(kernel, FIRST_KERNEL).ok_or(INVALID_HANDLE)?;
        Ok(found.put(library)?)
    }

    fn cuKernelGetName(found: Out<*const c_char>, kernel: Handle) |call| {
        ready(call)?;
        let name = name(call, kernel, FIRST_KERNEL).ok_or(INVALID_HANDLE)?;
        Ok(found.put(name.as_ptr())?)
    }

    // Functions that no module contains have no local memory.
    fn cuFuncGetAttribute(value: Out<c_int>, requested: c_int, function: Handle) |call| {
        ready(call)?;
        let objects = lock(&call.driver.objects);
        if objects.found(function, FIRST_KERNEL).is_some() {
            return Err(INVALID_HANDLE);
        }
        let local = objects.found(function, FIRST_FUNCTION).map_or(0, |found| objects.function(found).local);
        attribute(value, requested, local)
    }

    fn cuKernelGetAttribute(value: Out<c_int>, requested: c_int, kernel: Handle, of: Device) |call| {
        device(call, of)?;
        let objects = lock(&call.driver.objects);
        let found = objects.found(kernel, FIRST_KERNEL).ok_or(INVALID_HANDLE)?;
        attribute(value, requested, objects.function(found).local)
    }
}
