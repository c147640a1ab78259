//! The callback, which passes CUPTI's data to the decoder that both sources share.

use std::ffi::c_void;

use super::abi::{
    API_ENTER, CallbackData, DOMAIN_DRIVER_API, DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROY_STARTING, ResourceData,
};
use crate::sys::{
    calls::{
        Arguments, CALLS, Call, CallRecorder, CallShape, Caller, Context, Observe, STATE, ThreadState, Uncounted,
        record_entry, record_exit,
    },
    process,
};

/// One more than the largest of CUPTI's numbers in [`CALLS`].
const NUMBERS: usize = {
    let mut largest = 0;
    let mut at = 0;
    while at < CALLS.len() {
        if CALLS[at].0 > largest {
            largest = CALLS[at].0;
        }
        at += 1;
    }
    largest as usize + 1
};

/// The shape of each call, by CUPTI's number.
static SHAPES: [Option<CallShape>; NUMBERS] = {
    let mut shapes = [None; NUMBERS];
    let mut at = 0;
    while at < CALLS.len() {
        let (number, _, shape) = CALLS[at];
        if number != 0 {
            shapes[number as usize] = Some(shape);
        }
        at += 1;
    }
    shapes
};

/// CUPTI calls this function. It copies what it needs, because the data is valid only until it returns. It never unwinds into C.
pub(super) unsafe extern "C" fn callback<O: Observe>(_: *mut c_void, domain: u32, number: u32, data: *const c_void) {
    // In the child process of a fork, locks of the observer may be held by threads that do not exist there.
    if process::is_forked() {
        return;
    }
    if domain == DOMAIN_DRIVER_API {
        // SAFETY: in this domain CUPTI passes a `CUpti_CallbackData` of that call, valid until the callback returns.
        unsafe { record_call::<O>(number, &*data.cast::<CallbackData>()) };
    } else if domain == DOMAIN_RESOURCE && number == RESOURCE_CONTEXT_DESTROY_STARTING {
        // SAFETY: in this domain CUPTI passes a `CUpti_ResourceData` that is valid until the callback returns.
        let handle = unsafe { &*data.cast::<ResourceData>() }.context;
        let caller = Caller::Cupti(Context { handle, uid: 0 });
        CallRecorder::<O>::new(caller).record(&Call::ContextGone { handle });
    }
}

/// Decodes one side of a call. Most calls are recorded on one side only.
///
/// # Safety
/// `data` must belong to a call with this number.
#[inline]
unsafe fn record_call<O: Observe>(number: u32, data: &CallbackData) {
    let Some(Some(shape)) = SHAPES.get(number as usize) else { return };
    // SAFETY: `function_params` points to a struct of the call's arguments, which is valid until the callback returns.
    let arguments = unsafe { Arguments::new(data.function_params) };
    let caller = Caller::Cupti(Context { handle: data.context, uid: data.context_uid.into() });
    // SAFETY: this number has this shape, and this is its data.
    unsafe {
        match STATE.get() {
            ThreadState::Library => {}
            ThreadState::Observer => {
                record_side(*shape, data, arguments, &CallRecorder::<Uncounted<O>>::new(caller));
            }
            ThreadState::Program | ThreadState::Driver => {
                record_side(*shape, data, arguments, &CallRecorder::<O>::new(caller));
            }
        }
    }
}

/// Decodes the side of the call that CUPTI reports.
///
/// # Safety
/// `data` and `arguments` must belong to a call of this shape.
#[inline]
unsafe fn record_side(shape: CallShape, data: &CallbackData, arguments: Arguments, to: &CallRecorder<impl Observe>) {
    if data.side == API_ENTER {
        // SAFETY: the arguments belong to a call of this shape.
        unsafe { record_entry(shape, arguments, to) };
    } else {
        // SAFETY: as above; after the call, CUPTI passes the address of its `CUresult`.
        unsafe { record_exit(shape, data.function_return_value.read(), arguments, to) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_by_its_number() {
        for (number, name, shape) in CALLS.iter().filter(|(number, ..)| *number != 0) {
            assert_eq!(SHAPES[*number as usize], Some(*shape), "{name}");
        }
        assert_eq!(SHAPES.iter().flatten().count(), CALLS.iter().filter(|(number, ..)| *number != 0).count());
    }
}
