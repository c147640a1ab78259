//! Answers calls about simulated GPUs: their number and properties, their contexts and pools, and whether one can access another.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    mem,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

use cudarc::driver::sys;

use super::{
    blocks,
    cards::{self, CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_DEVICE, Cards, Primary, cards, of_context},
    replaced::DRIVERS,
    runtime,
    state::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Real, SUCCESS, get, here, inside, put},
    table::{CardCall, FUNCTIONS},
};
use crate::sys::cuda;

const CUDA_ERROR_INVALID_CONTEXT: u32 = 201;
const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: u32 = 705;
const CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: u32 = 1;

/// Held while a primary context or a default pool is created or destroyed, even during driver calls.
static CHANGES: Mutex<()> = Mutex::new(());

fn changes() -> MutexGuard<'static, ()> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers a call about simulated GPUs.
///
/// # Safety
/// `words` must be the arguments of such a call, and `real` must make it with the driver's device.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
#[expect(clippy::too_many_lines, reason = "each kind of call has an arm")]
pub(super) unsafe fn run(call: CardCall, words: &[u64], real: Real<'_>, driver: &dyn Fn(&[u64]) -> u32) -> u32 {
    use CardCall as C;
    let count = cards::count();
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    // SAFETY: this function's contract requires that `words` are the arguments of the call. A pointer to an int is not null where the
    // driver has just written through it.
    unsafe {
        let put_int = |out: u64, value: u32| (out as *mut u32).write_unaligned(value);
        let is_card = |ordinal: u64| (ordinal as u32) < count;
        // Ordinals of the machine's devices are not changed.
        let shift = |ordinal: u64| if cards::is_of_machine(ordinal) { 0 } else { ordinal as u32 };
        match call {
            C::Plain => real(),
            C::Reject => CUDA_ERROR_NOT_SUPPORTED,
            C::Count => {
                cards::look_for_runtime();
                after(real(), || {
                    if cards::show_machine() {
                        cards::note_machine((word(0) as *const u32).read_unaligned());
                    } else {
                        put_int(word(0), count);
                    }
                })
            }
            C::Ordinal if cards::is_of_machine(word(1)) => real(),
            // The driver returns the error of the call, because there is a device 0.
            C::Ordinal if is_card(word(1)) => {
                let ordinal = word(1) as u32;
                after(inside(|| driver(&[word(0), 0])), || put_int(word(0), ordinal))
            }
            C::Ordinal => CUDA_ERROR_INVALID_DEVICE,
            C::Uuid => after(real(), || *((word(0) + 15) as *mut u8) ^= shift(word(1)) as u8),
            C::BusId => after(real(), || move_domain(word(0) as *mut u8, shift(word(2)))),
            C::ByBusId => by_bus_id(word(0), word(1), count, driver),
            C::Attribute => after(real(), || {
                const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: u32 = 50;
                const CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: u32 = 132;
                let value = (word(0) as *const u32).read_unaligned();
                match word(1) as u32 {
                    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => put_int(word(0), value + shift(word(2))),
                    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED => put_int(word(0), 0),
                    _ => {}
                }
            }),
            C::CanAccess { device } => {
                let (one, other) = (word(device), word(device + 1));
                if word(0) == 0 || !is_card(one) || !is_card(other) {
                    return if word(0) == 0 { CUDA_ERROR_INVALID_VALUE } else { CUDA_ERROR_INVALID_DEVICE };
                }
                let is_rank = device == 2 && word(1) as u32 == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK;
                put_int(word(0), u32::from(one as u32 != other as u32 && !is_rank));
                SUCCESS
            }
            C::EnablePeer | C::DisablePeer => {
                let (context, card) = here();
                if of_context(word(0)).unwrap_or(0) == card {
                    return real();
                }
                let peers = &mut cards().peers;
                match call {
                    C::EnablePeer if peers.insert((context, word(0))) => SUCCESS,
                    C::EnablePeer => CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
                    _ if peers.remove(&(context, word(0))) => SUCCESS,
                    _ => CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
                }
            }
            C::CreateContext { device } => {
                after(real(), || note(|cards| &mut cards.contexts, get(word(0)), word(device)))
            }
            C::CreatePool => after(real(), || note(|cards| &mut cards.pools, get(word(0)), get(word(1) + 8) >> 32)),
            C::CreateStream => after(real(), || note(|cards| &mut cards.streams, get(word(0)), here().1.into())),
            C::EndStream => {
                cards().streams.remove(&word(0));
                real()
            }
            C::ContextDevice { out, context: None } if cards::are_of_runtime() => after(real(), || {
                if cuda::is_own() {
                    put_int(word(out), here().1);
                }
            }),
            C::ContextDevice { .. } | C::StreamDevice if cards::are_of_runtime() => real(),
            C::ContextDevice { out, context } => after(real(), || {
                let context = context.map_or_else(|| here().0, word);
                if let Some(card) = of_context(context) {
                    put_int(word(out), card);
                }
            }),
            C::StreamDevice => after(real(), || {
                let mut context = std::ptr::null_mut();
                let answer = inside(|| sys::cuStreamGetCtx(word(0) as *mut _, &raw mut context));
                if let Some(card) = answer.result().ok().and_then(|()| of_context(context as u64)) {
                    put_int(word(1), card);
                }
            }),
            // The calls below concern one card. The first one is the driver's device.
            C::Retain if word(1) as u32 == 0 => real(),
            C::DefaultPool { .. } if word(1) as u32 == 0 => {
                after(real(), || note(|cards| &mut cards.pools, get(word(0)), 0))
            }
            C::Retain | C::DefaultPool { .. } if !is_card(word(1)) => CUDA_ERROR_INVALID_DEVICE,
            C::Retain if cards::are_of_runtime() => real(),
            C::Retain => retain(word(0), word(1) as u32),
            C::DefaultPool { is_current } => default_pool(word(0), word(1) as u32, is_current),
            _ if word(0) as u32 == 0 => real(),
            _ if !is_card(word(0)) => CUDA_ERROR_INVALID_DEVICE,
            C::SetPool => {
                cards().current_pool.insert(word(0) as u32, word(1));
                SUCCESS
            }
            C::Release | C::SetFlags if cards::are_of_runtime() => real(),
            C::State if cards::are_of_runtime() => after(driver(&[0, word(1), word(2)]), || {
                put_int(word(2), u32::from(cuda::is_card_used(word(0) as u32)));
            }),
            C::Release => release(word(0) as u32, |primary| primary.references.saturating_sub(1)),
            C::SetFlags => {
                cards().primary.entry(word(0) as u32).or_default().flags = word(1);
                SUCCESS
            }
            C::State => {
                let Primary { references, flags, .. } = primary(word(0) as u32);
                put_int(word(1), flags as u32);
                put_int(word(2), u32::from(references > 0));
                SUCCESS
            }
        }
    }
}

/// Runs `then` if the call succeeded. Returns the result of the call.
fn after(result: u32, then: impl FnOnce()) -> u32 {
    if result == SUCCESS {
        then();
    }
    result
}

/// Remembers on which simulated GPU a handle was created.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
fn note(which: impl FnOnce(&mut Cards) -> &mut BTreeMap<u64, u32>, created: u64, card: u64) {
    which(&mut cards()).insert(created, card as u32);
}

fn primary(card: u32) -> Primary {
    cards().primary.get(&card).copied().unwrap_or_default()
}

/// # Safety
/// `out` must be null, or valid for writing a context.
unsafe fn retain(out: u64, card: u32) -> u32 {
    if out == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let _changes = changes();
    let mut known = primary(card);
    if known.references == 0 {
        match create_context(known.flags) {
            Ok(context) => known.context = context,
            Err(code) => return code,
        }
    }
    known.references += 1;
    let mut cards = cards();
    cards.contexts.insert(known.context, card);
    cards.primary.insert(card, known);
    // SAFETY: `out` is not null, and is a place for a context, by the contract of this function.
    unsafe { put(out, known.context) };
    SUCCESS
}

/// Creates a context on the driver's device, without making it current.
fn create_context(flags: u64) -> Result<u64, u32> {
    type Create = unsafe extern "C-unwind" fn(*mut sys::CUcontext, u64, u64) -> u32;

    // The bindings only have the version of the toolkit with which gpumem is built. The driver has all versions.
    let row = FUNCTIONS.iter().position(|(name, _)| *name == "cuCtxCreate_v2");
    let driver = row.map_or(0, |row| DRIVERS[row].load(Relaxed));
    if driver == 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let (mut context, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: it is the driver's `cuCtxCreate_v2`, and the out-parameters are live. The context that it has made current is popped.
    let code = inside(|| unsafe {
        let code = mem::transmute::<usize, Create>(driver)(&raw mut context, flags, 0);
        if code == SUCCESS {
            let _ = sys::cuCtxPopCurrent_v2(&raw mut popped).result();
        }
        code
    });
    if code == SUCCESS { Ok(context as u64) } else { Err(code) }
}

/// Sets the number of references to the primary context of a simulated GPU, and destroys the context if there are none.
fn release(card: u32, references: impl FnOnce(Primary) -> u32) -> u32 {
    let _changes = changes();
    let known = primary(card);
    if known.references == 0 {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    let references = references(known);
    if references == 0 {
        // SAFETY: it is the context that `retain` has created, and it has no more references.
        let destroy = || inside(|| unsafe { sys::cuCtxDestroy_v2(known.context as *mut _) }) as u32;
        let code = blocks::destroy_context(known.context, &destroy);
        if code != SUCCESS {
            return code;
        }
    }
    cards().primary.insert(card, Primary { references, ..known });
    SUCCESS
}

/// Destroys the primary context of a simulated GPU, even if there are references to it. Returns `None` if it is the driver's own device.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) fn reset_primary_context(ordinal: u64) -> Option<u32> {
    let card = ordinal as u32;
    if cards::are_of_runtime() {
        return Some(runtime::reset(card));
    }
    if !cards::are_simulated() || card == 0 {
        return None;
    }
    Some(match release(card, |_| 0) {
        // Like in the driver, the call has no effect.
        CUDA_ERROR_INVALID_CONTEXT if card < cards::count() => SUCCESS,
        CUDA_ERROR_INVALID_CONTEXT => CUDA_ERROR_INVALID_DEVICE,
        code => code,
    })
}

/// Creates the pool of a simulated GPU. Hooks and the account find the GPU by its pool.
///
/// # Safety
/// `out` must be null, or valid for writing a pool.
unsafe fn default_pool(out: u64, card: u32, is_current: bool) -> u32 {
    if out == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let _changes = changes();
    let current = cards().current_pool.get(&card).copied().filter(|_| is_current);
    let known = current.or_else(|| cards().default_pool.get(&card).copied());
    let pool = match known.map_or_else(|| create_pool(card), Ok) {
        Ok(pool) => pool,
        Err(code) => return code,
    };
    // SAFETY: `out` is not null, and is a place for a pool, by the contract of this function.
    unsafe { put(out, pool) };
    SUCCESS
}

fn create_pool(card: u32) -> Result<u64, u32> {
    // The properties are a `CUmemPoolProps`: `CU_MEM_ALLOCATION_TYPE_PINNED`, no handles, on device 0.
    let properties = [1, CU_MEM_LOCATION_TYPE_DEVICE, 0, 0, 0, 0, 0, 0, 0, 0, 0_u64];
    let mut pool = std::ptr::null_mut();
    // SAFETY: the out-parameter is live, and the properties are as long as the struct.
    let code = inside(|| unsafe { sys::cuMemPoolCreate(&raw mut pool, properties.as_ptr().cast()) });
    if code.result().is_err() {
        return Err(code as u32);
    }
    let mut cards = cards();
    cards.default_pool.insert(card, pool as u64);
    cards.pools.insert(pool as u64, card);
    Ok(pool as u64)
}

/// Changes a bus id to a simulated GPU's. The ids differ in their domain: `0003:19:00.0` belongs to the fourth. The machine has no
/// such bus.
///
/// # Safety
/// `text` must be a C string that is valid for writes.
pub(super) unsafe fn move_domain(text: *mut u8, by: u32) {
    // SAFETY: a C string is there, by the contract of this function.
    let domain =
        unsafe { CStr::from_ptr(text.cast()) }.to_bytes().split(|byte| *byte == b':').next().unwrap_or_default();
    let (width, value) =
        (domain.len(), str::from_utf8(domain).ok().and_then(|text| u32::from_str_radix(text, 16).ok()));
    if let Some(value) = value {
        let moved = format!("{:0width$x}", value.wrapping_add(by));
        // SAFETY: the string has as many bytes. A domain that has become longer is cut.
        unsafe { std::ptr::copy_nonoverlapping(moved.as_ptr(), text, width) };
    }
}

/// # Safety
/// The words are a place for an int, and the address of a C string.
unsafe fn by_bus_id(out: u64, text: u64, count: u32, driver: &dyn Fn(&[u64]) -> u32) -> u32 {
    if out == 0 || text == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for card in 0..count {
        // SAFETY: the words are a place for an int and the address of a C string, by the contract of this function. The copy is a C string
        // as well.
        unsafe {
            let mut text = CStr::from_ptr(text as *const _).to_bytes_with_nul().to_vec();
            move_domain(text.as_mut_ptr(), card.wrapping_neg());
            let mut device = -1_i32;
            let code = inside(|| driver(&[&raw mut device as u64, text.as_ptr() as u64]));
            if code == SUCCESS && device == 0 {
                (out as *mut u32).write_unaligned(card);
                return SUCCESS;
            }
        }
    }
    CUDA_ERROR_INVALID_DEVICE
}
