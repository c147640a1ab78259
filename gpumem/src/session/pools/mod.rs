//! Pools that the program registers: its own allocators, which take blocks from the driver and hand out parts of them.

mod table;

use std::{fmt, iter};

use self::table::NamedPool;
pub(super) use self::table::PoolTable;
use super::{Session, current};
use crate::{
    error::{Kind, Result},
    inbox::LedgerView,
    model::{Block, Bytes, Device, EventKind, Family, Gauge, Key, MemKind, PoolId, Space, StackId, Tag, TensorPool},
    process,
    recorded_pools::RecordedPool,
    source::{Devices, min_bytes_of},
};

/// A pool of the program, which hands out parts of the driver's blocks; see the [module](crate::pool).
///
/// Several threads may use it at the same time. When it is dropped, its parts count as freed.
pub struct Pool {
    session: &'static Session,
    id: PoolId,
    device: Device,
    /// The same pool in the library of `gpumem run`.
    recorded: Option<RecordedPool>,
    /// No stack is recorded for smaller parts.
    min_bytes: u64,
}

impl Pool {
    /// Registers a pool on a device; `None` is the calling thread's current device. Traces of this device then count the parts of the
    /// pool instead of its blocks. Register a pool before it takes its first block: allocations are intercepted from then on. A pool with
    /// an empty name is called `pool`. The second pool of the same name on a device is called `NAME #2`.
    ///
    /// # Errors
    /// Returns an error if there is no such device, if there are already 54 pools, or if allocations cannot be intercepted, unless `gpumem
    /// run` records the pool.
    pub fn register(name: impl Into<String>, device: impl Into<Option<u32>>) -> Result<Self> {
        let session = current();
        let devices = session.devices()?;
        let device = devices.device(device.into())?;
        devices.check(device.ordinal)?;
        let name = Some(name.into()).filter(|name| !name.is_empty()).unwrap_or_else(|| "pool".to_owned());
        let id = session.number_pool(&name, device)?;
        // That library itself calls this function.
        let is_recordable = device.family == Family::Cuda && !session.settings.is_foreign;
        let recorded = is_recordable.then(|| RecordedPool::register(&name, device.ordinal)).flatten();
        if recorded.is_none() {
            session.subscribe_for_pool(devices).inspect_err(|_| session.pools.close(id))?;
        } else if devices.subscribed().is_none() {
            // The program intercepts the driver itself only when it starts a trace, and does not know earlier blocks.
            session.inbox.post(&EventKind::Lost { count: 0 });
        }
        #[cfg(feature = "capture")]
        session.record_pool(id);
        session.inbox.post(&EventKind::PoolRegistered { pool: id, device });
        Ok(Self { session, id, device, min_bytes: min_bytes_of(session.settings), recorded })
    }

    /// Reports that the pool has handed out a part. Call this after the part is taken, on the thread that requested it: the part counts for
    /// the scopes of this thread. Do not report a part of 0 bytes if the next part can have the same address.
    #[inline]
    pub fn allocated(&self, address: u64, bytes: Bytes) {
        if process::is_forked() {
            return;
        }
        let stack = if bytes.get() < self.min_bytes { StackId::NONE } else { self.session.stack_here() };
        let tag = Tag::new(self.device, MemKind::Part, self.id.0, stack);
        self.session.inbox.part(Key::of_part(self.id, address), bytes, tag);
        if let Some(recorded) = &self.recorded {
            recorded.allocated(address, bytes.get());
        }
    }

    /// Reports that a part is freed. Call this before the pool can hand out the address again.
    #[inline]
    pub fn freed(&self, address: u64) {
        if process::is_forked() {
            return;
        }
        self.session.inbox.free(Key::of_part(self.id, address));
        if let Some(recorded) = &self.recorded {
            recorded.freed(address);
        }
    }

    /// Reports the total memory that the pool holds from the driver, used or unused. With 0 the pool is empty, and all its parts count as
    /// freed.
    ///
    /// A block of the driver counts as the pool's once the pool reports a part in it. If other allocations of the thread come before that,
    /// call this right after the driver gave the block, on the same thread, with the exact sum. If another thread allocates, frees or reads
    /// results in between, these include the whole block ([`read_early`](crate::report::RegisteredPool::read_early) counts such blocks).
    /// Therefore a pool of several threads must hold one lock around the driver's call and this one, and for its other calls.
    pub fn set_reserved(&self, bytes: Bytes) {
        let pool = self.id;
        if bytes == Bytes::ZERO {
            self.session.inbox.post(&EventKind::PoolEmptied { pool });
        }
        self.session.inbox.post(&EventKind::PoolReserved { pool, bytes });
        if let Some(recorded) = self.recorded.as_ref().filter(|_| !process::is_forked()) {
            recorded.set_reserved(bytes.get());
        }
    }
}

impl TensorPool for Pool {
    #[inline]
    fn has_block(&self, address: u64, size: Bytes) {
        let key = Key::new(Space::Address, address);
        if self.session.inbox.block(key).is_none() {
            let block = Block::new(self.device, size, MemKind::Device);
            self.session.inbox.post(&EventKind::Alloc { key, block });
        }
    }

    #[inline]
    fn allocated(&self, address: u64, size: Bytes) {
        Self::allocated(self, address, size);
    }

    #[inline]
    fn freed(&self, address: u64) {
        Self::freed(self, address);
    }

    #[inline]
    fn set_reserved(&self, size: Bytes) {
        Self::set_reserved(self, size);
    }
}

impl Session {
    /// Returns an id for a new pool. If another pool of the device has the same name, the new one is named like `arena #2`.
    fn number_pool(&'static self, name: &str, device: Device) -> Result<PoolId> {
        self.ensure_started();
        let mut pools = self.pools.lock();
        // The id of a closed pool is reused after all its blocks are freed.
        let live: Vec<_> =
            self.inbox.pools().iter().filter(|pool| pool.block_bytes > Bytes::ZERO).map(|pool| pool.pool).collect();
        let is_unused = |(at, pool): (usize, &NamedPool)| pool.is_closed && !live.contains(&id_of(at));
        let at = pools.iter().enumerate().position(is_unused).unwrap_or(pools.len());
        let id = id_of(at);
        if id > PoolId::LAST {
            let detail = format!(
                "there are {} pools already, the most that a process can have, so `{name}` is not measured; register \
                 one for several of your allocators",
                pools.len()
            );
            return Err(Kind::BadSetting { setting: "another pool", detail }.into());
        }
        let is_taken = |name: &String| {
            pools.iter().enumerate().any(|(other, pool)| other != at && pool.device == device && pool.name == *name)
        };
        let numbered = (2..).map(|number| format!("{name} #{number}"));
        let name = iter::once(name.to_owned()).chain(numbered).find(|name| !is_taken(name)).unwrap_or_default();
        let named = NamedPool { name, device, is_closed: false };
        if at == pools.len() {
            pools.push(named);
        } else {
            pools[at] = named;
        }
        Ok(id)
    }

    /// Starts to intercept allocations, unless `GPUMEM_GAUGE` is set to a gauge that ignores them.
    fn subscribe_for_pool(&'static self, devices: &dyn Devices) -> Result<()> {
        if matches!(self.settings().gauge()?, None | Some(Gauge::Exact)) {
            self.subscribe(devices, None, false)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("id", &self.id).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        self.session.inbox.post(&EventKind::PoolEmptied { pool: self.id });
        self.session.pools.close(self.id);
    }
}

/// Returns the id of the pool at this index.
fn id_of(at: usize) -> PoolId {
    PoolId(u8::try_from(at + 1).unwrap_or(u8::MAX))
}
