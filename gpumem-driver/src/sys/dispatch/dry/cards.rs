//! Several cards on one device: what the program calls device 3 is the fourth simulated card. Each card but the first has contexts and a pool
//! of its own on the driver's device 0, so what is real there (small blocks, streams, kernels) works as always.
//!
//! The ordinals are translated here, at the border: the program and all libraries use those of the cards, the driver gets 0.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use cudarc::driver::sys;

use super::{
    blocks,
    replaced::DRIVERS,
    state::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Real, SUCCESS, get, here, inside, put},
    table::{CardCall, FUNCTIONS},
};

const CUDA_ERROR_INVALID_DEVICE: u32 = 101;
const CUDA_ERROR_INVALID_CONTEXT: u32 = 201;
const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: u32 = 705;
const CU_MEM_LOCATION_TYPE_DEVICE: u64 = 1;
const CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: u32 = 1;

/// How many cards the program sees; 0 if it sees the devices of the machine.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// What belongs to the cards after the first.
#[derive(Default)]
struct Cards {
    /// The card of each context and of each pool.
    contexts: BTreeMap<u64, u32>,
    pools: BTreeMap<u64, u32>,
    primary: BTreeMap<u32, Primary>,
    /// The default pool of each card, and its current one.
    default_pool: BTreeMap<u32, u64>,
    current_pool: BTreeMap<u32, u64>,
    /// The contexts of the first may use memory of the second.
    peers: BTreeSet<(u64, u64)>,
}

/// A primary context. Without references there is none.
#[derive(Clone, Copy, Default)]
struct Primary {
    context: u64,
    references: u32,
    flags: u64,
}

static CARDS: Mutex<Cards> = Mutex::new(Cards {
    contexts: BTreeMap::new(),
    pools: BTreeMap::new(),
    primary: BTreeMap::new(),
    default_pool: BTreeMap::new(),
    current_pool: BTreeMap::new(),
    peers: BTreeSet::new(),
});

/// Held while a primary context or a default pool begins or ends, also during calls of the driver.
static CHANGES: Mutex<()> = Mutex::new(());

/// Held for a few steps, and never during a call of the driver.
fn cards() -> MutexGuard<'static, Cards> {
    CARDS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn changes() -> MutexGuard<'static, ()> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on the program sees so many cards.
pub(super) fn begin(count: u32) {
    COUNT.store(count, Relaxed);
}

/// Whether the program's devices are simulated cards.
pub(super) fn are_simulated() -> bool {
    COUNT.load(Relaxed) > 0
}

/// The card of a context, if it is not of the first card.
pub(super) fn of_context(context: u64) -> Option<u32> {
    are_simulated().then(|| cards().contexts.get(&context).copied())?
}

/// The card of a pool; that of the current context if it is not known.
pub(super) fn of_pool(pool: u64) -> u32 {
    let known = if are_simulated() { cards().pools.get(&pool).copied() } else { None };
    known.unwrap_or_else(|| here().1)
}

/// The context has ended.
pub(super) fn forget(context: u64) {
    let mut cards = cards();
    cards.contexts.remove(&context);
    cards.peers.retain(|(one, other)| *one != context && *other != context);
}

/// The device of the driver for an ordinal of the program: a negative one is the host.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
fn on_driver(ordinal: u64) -> Result<u64, u32> {
    match (ordinal as i32).try_into() {
        Ok(card) if u32::lt(&card, &COUNT.load(Relaxed)) => Ok(0),
        Ok(_) => Err(CUDA_ERROR_INVALID_DEVICE),
        Err(_) => Ok(ordinal),
    }
}

/// The same for a `CUmemLocation`, whose first int says what the second is.
pub(super) fn location_on_driver(location: u64) -> Result<u64, u32> {
    match location & 0xffff_ffff {
        CU_MEM_LOCATION_TYPE_DEVICE if are_simulated() => {
            Ok(on_driver(location >> 32)? << 32 | CU_MEM_LOCATION_TYPE_DEVICE)
        }
        _ => Ok(location),
    }
}

/// Calls the driver with its own device in all places in which the program names a card. An argument's name says what it is: `device` and
/// `location` are values; `place` is the address of a location; the structs at `properties` and `pool_properties` have a location as their
/// second word; `descriptors` are so many `CUmemAccessDesc` as the next argument says.
///
/// # Safety
/// The words are the arguments of a call, and have these names. What their addresses name can be read.
pub(super) unsafe fn with_drivers_device(names: &[&str], words: &[u64], call: &dyn Fn(&[u64]) -> u32) -> u32 {
    if !are_simulated() {
        return call(words);
    }
    let mut words = words.to_vec();
    // The longest struct is `CUmemPoolProps`.
    let mut copy = [0_u64; 11];
    let descriptors;
    for (at, name) in names.iter().enumerate() {
        let (length, second) = match *name {
            "device" | "location" => {
                let place = if *name == "device" { on_driver(words[at]) } else { location_on_driver(words[at]) };
                match place {
                    Ok(place) => words[at] = place,
                    Err(code) => return code,
                }
                continue;
            }
            "descriptors" if words[at] != 0 => {
                // SAFETY: the caller passes so many.
                descriptors = match unsafe { descriptors_on_driver(words[at], words[at + 1]) } {
                    Ok(descriptors) => descriptors,
                    Err(code) => return code,
                };
                (words[at], words[at + 1]) = (descriptors.as_ptr() as u64, descriptors.len() as u64);
                break;
            }
            "place" => (1, 0),
            "properties" => (4, 1),
            "pool_properties" => (11, 1),
            _ => continue,
        };
        if words[at] != 0 {
            // SAFETY: the struct has so many words.
            (0..length).for_each(|word| copy[word] = unsafe { get(words[at] + word as u64 * 8) });
            match location_on_driver(copy[second]) {
                Ok(location) => copy[second] = location,
                Err(code) => return code,
            }
            words[at] = copy.as_ptr() as u64;
        }
    }
    call(&words)
}

/// A list of `CUmemAccessDesc`: three ints each, of which two are a location. Each place is in it once, with the last access to it.
///
/// # Safety
/// So many can be read there.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
pub(super) unsafe fn descriptors_on_driver(at: u64, count: u64) -> Result<Vec<[u32; 3]>, u32> {
    let mut places: Vec<[u32; 3]> = Vec::new();
    for index in 0..count {
        // SAFETY: the caller says so.
        let [sort, id, access] = unsafe { ((at + index * 12) as *const [u32; 3]).read_unaligned() };
        let id = (location_on_driver(u64::from(id) << 32 | u64::from(sort))? >> 32) as u32;
        places.retain(|[known, other, _]| (*known, *other) != (sort, id));
        places.push([sort, id, access]);
    }
    Ok(places)
}

/// Answers a call about cards.
///
/// # Safety
/// `words` are the arguments of such a call. `real` makes it with the driver's device.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn run(call: CardCall, words: &[u64], real: Real<'_>, driver: &dyn Fn(&[u64]) -> u32) -> u32 {
    use CardCall as C;
    let count = COUNT.load(Relaxed);
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    // SAFETY: the caller says so; a place for an int is not null where the driver has just written to it.
    unsafe {
        let put_int = |out: u64, value: u32| (out as *mut u32).write_unaligned(value);
        let is_card = |ordinal: u64| (ordinal as u32) < count;
        match call {
            C::Plain => real(),
            C::Refuse => CUDA_ERROR_NOT_SUPPORTED,
            C::Count => after(real(), || put_int(word(0), count)),
            // The driver says what is wrong with the call: there is a device 0.
            C::Ordinal if is_card(word(1)) => {
                let ordinal = word(1) as u32;
                after(inside(|| driver(&[word(0), 0])), || put_int(word(0), ordinal))
            }
            C::Ordinal => CUDA_ERROR_INVALID_DEVICE,
            C::Uuid => after(real(), || *((word(0) + 15) as *mut u8) ^= word(1) as u8),
            C::BusId => after(real(), || move_domain(word(0) as *mut u8, word(2) as u32)),
            C::ByBusId => by_bus_id(word(0), word(1), count, driver),
            C::Attribute => after(real(), || {
                const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: u32 = 50;
                const CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: u32 = 132;
                let value = (word(0) as *const u32).read_unaligned();
                match word(1) as u32 {
                    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => put_int(word(0), value + word(2) as u32),
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
            C::ContextDevice { out, context } => after(real(), || {
                let context = context.map_or_else(|| here().0, word);
                if let Some(card) = of_context(context) {
                    put_int(word(out), card);
                }
            }),
            C::StreamDevice => after(real(), || {
                let mut context = std::ptr::null_mut();
                let asked = inside(|| sys::cuStreamGetCtx(word(0) as *mut _, &raw mut context));
                if let Some(card) = asked.result().ok().and_then(|()| of_context(context as u64)) {
                    put_int(word(1), card);
                }
            }),
            // What follows concerns one card. The first one is the driver's device.
            C::Retain | C::DefaultPool { .. } if word(1) as u32 == 0 => real(),
            C::Retain | C::DefaultPool { .. } if !is_card(word(1)) => CUDA_ERROR_INVALID_DEVICE,
            C::Retain => retain(word(0), word(1) as u32),
            C::DefaultPool { is_current } => default_pool(word(0), word(1) as u32, is_current),
            _ if word(0) as u32 == 0 => real(),
            _ if !is_card(word(0)) => CUDA_ERROR_INVALID_DEVICE,
            C::SetPool => {
                cards().current_pool.insert(word(0) as u32, word(1));
                SUCCESS
            }
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

/// Does this if the call has succeeded.
fn after(result: u32, then: impl FnOnce()) -> u32 {
    if result == SUCCESS {
        then();
    }
    result
}

/// Remembers the card of something that was created on it.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
fn note(which: impl FnOnce(&mut Cards) -> &mut BTreeMap<u64, u32>, created: u64, card: u64) {
    which(&mut cards()).insert(created, card as u32);
}

fn primary(card: u32) -> Primary {
    cards().primary.get(&card).copied().unwrap_or_default()
}

/// # Safety
/// The context is written to `out`.
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
    // SAFETY: the caller says so.
    unsafe { put(out, known.context) };
    SUCCESS
}

/// A context on the driver's device, which is not current.
fn create_context(flags: u64) -> Result<u64, u32> {
    type Create = unsafe extern "C-unwind" fn(*mut sys::CUcontext, u64, u64) -> u32;

    // Of several versions, the bindings have the one of the toolkit with which gpumem is built. The driver has all.
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

/// Releases a card's primary context, which has so many references from then on.
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

/// Ends the primary context of a card, whatever refers to it. `None`: it is the driver's device.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) fn reset_primary_context(ordinal: u64) -> Option<u32> {
    let card = ordinal as u32;
    if !are_simulated() || card == 0 {
        return None;
    }
    Some(match release(card, |_| 0) {
        // As in the driver, nothing is to be done then.
        CUDA_ERROR_INVALID_CONTEXT if card < COUNT.load(Relaxed) => SUCCESS,
        CUDA_ERROR_INVALID_CONTEXT => CUDA_ERROR_INVALID_DEVICE,
        code => code,
    })
}

/// A card's pool: hooks and accounts know by the pool which card it is.
///
/// # Safety
/// The pool is written to `out`.
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
    // SAFETY: the caller says so.
    unsafe { put(out, pool) };
    SUCCESS
}

fn create_pool(card: u32) -> Result<u64, u32> {
    // A `CUmemPoolProps`: `CU_MEM_ALLOCATION_TYPE_PINNED`, no handles, on device 0.
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

/// The bus ids of cards differ in their domain: `0003:19:00.0` is that of the fourth. There is no such bus in the machine.
///
/// # Safety
/// A C string is there, and can be written.
unsafe fn move_domain(text: *mut u8, by: u32) {
    // SAFETY: the caller says so.
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
        // SAFETY: the caller says so. The copy is a C string as well.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_gets_its_own_device() {
        begin(4);
        let (location, host) = (3 << 32 | 1, 1_u64 << 32 | 2);
        let properties = [1, location, 0, 0];
        let descriptors = [[1_u32, 2, 3], [1, 3, 1], [2, 1, 3]];
        let names = ["properties", "device", "location", "descriptors", "count"];
        let words = |device: u64| {
            [properties.as_ptr() as u64, device, location, descriptors.as_ptr() as u64, descriptors.len() as u64]
        };
        let call = |words: &[u64]| {
            // SAFETY: these are the addresses from above, or of copies of what is there.
            let (second, list) = unsafe {
                (
                    get(words[0] + 8),
                    std::slice::from_raw_parts(words[3] as *const [u32; 3], usize::try_from(words[4]).unwrap()),
                )
            };
            assert_eq!((second, words[2], list), (1, 1, &[[1, 0, 1], [2, 1, 3]][..]));
            u32::try_from(words[1] & 0xff).unwrap()
        };
        // SAFETY: as above. -1 is the host, and 4 no card.
        let made =
            [2, u64::from(u32::MAX), 4].map(|device| unsafe { with_drivers_device(&names, &words(device), &call) });
        assert_eq!(made, [0, 0xff, CUDA_ERROR_INVALID_DEVICE]);
        assert_eq!(location_on_driver(host), Ok(host));
        let mut text = *b"0000:19:00.0\0";
        // SAFETY: it is a C string.
        unsafe { move_domain(text.as_mut_ptr(), 17) };
        assert_eq!(&text, b"0011:19:00.0\0");
        begin(0);
    }
}
