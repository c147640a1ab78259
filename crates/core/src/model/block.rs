//! Blocks of memory: their kinds and keys.

use super::{Bytes, Device, Family, StackId};

/// The kind of memory of a block.
///
/// ```
/// use gpumem::report::MemKind;
///
/// assert_eq!(MemKind::PinnedHost.to_string(), "pinned host");
/// assert!(!MemKind::PinnedHost.is_on_device());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemKind {
    /// Device memory: `cuMemAlloc`, arrays.
    Device,
    /// Stream-ordered memory: `cuMemAllocAsync`.
    Pool,
    /// Managed memory, which moves to where it is used: `cuMemAllocManaged`.
    Managed,
    /// Pinned host memory: `cuMemAllocHost`, `cuMemHostRegister`.
    PinnedHost,
    /// Physical memory behind a handle: `cuMemCreate`.
    Vmm,
    /// The memory that the driver maps for the memory nodes of graphs: `cuGraphLaunch`.
    Graph,
    /// A part of the memory of a pool that the program registered (`gpumem::pool`). The driver does not know about parts.
    Part,
    /// Taken by the driver: what a context needs before anything else.
    Context,
    /// Taken by the driver: the code and the variables of modules, which are loaded with them or at the first use of a function.
    Modules,
    /// Taken by the driver: the local memory of each thread that a device can run at once, for the kernel that needs most.
    LocalMemory,
    /// Taken by the driver: the heap of the device, the buffer of `printf`, and what other limits of a context need.
    Limits,
    /// Taken by the driver: streams, and access to other devices.
    Streams,
    /// Taken by the driver: graphs that were made executable.
    ExecutableGraphs,
    /// Taken by the driver: memory that a stream-ordered pool keeps and no allocation uses.
    PoolCache,
    /// Taken by the driver: calls of several threads at once, so the cause is not known.
    SharedCalls,
    /// Taken by the driver before the recording started.
    Earlier,
    /// Taken by the driver without a call that explains it.
    NotKnown,
}

impl MemKind {
    #[doc(hidden)]
    pub const ALL: [Self; 17] = [
        Self::Device,
        Self::Pool,
        Self::Managed,
        Self::PinnedHost,
        Self::Vmm,
        Self::Graph,
        Self::Part,
        Self::Context,
        Self::Modules,
        Self::LocalMemory,
        Self::Limits,
        Self::Streams,
        Self::ExecutableGraphs,
        Self::PoolCache,
        Self::SharedCalls,
        Self::Earlier,
        Self::NotKnown,
    ];

    /// Returns the name in reports and in JSON, such as `pinned host`.
    ///
    /// ```
    /// assert_eq!(gpumem::report::MemKind::Vmm.name(), "vmm");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pool => "pool",
            Self::Managed => "managed",
            Self::PinnedHost => "pinned host",
            Self::Vmm => "vmm",
            Self::Graph => "graph",
            Self::Part => "part",
            Self::Context => "context",
            Self::Modules => "modules",
            Self::LocalMemory => "local memory",
            Self::Limits => "limits",
            Self::Streams => "streams",
            Self::ExecutableGraphs => "executable graphs",
            Self::PoolCache => "unused in pools",
            Self::SharedCalls => "calls at once",
            Self::Earlier => "before the recording",
            Self::NotKnown => "not known",
        }
    }

    /// Returns whether memory of this kind is certainly on the device. Traces count only such memory: managed memory may have
    /// moved to the host, and pinned memory is on the host.
    ///
    /// ```
    /// use gpumem::report::MemKind;
    ///
    /// assert!(MemKind::Pool.is_on_device());
    /// assert!(!MemKind::Managed.is_on_device()); // it may be on the host
    /// ```
    pub const fn is_on_device(self) -> bool {
        matches!(self, Self::Device | Self::Pool | Self::Vmm | Self::Graph | Self::Part)
    }

    /// Returns whether the driver takes memory of this kind by itself. No call asks for it, so traces do not count it, and its
    /// size is the difference of two readings of the device.
    ///
    /// ```
    /// use gpumem::report::MemKind;
    ///
    /// assert!(MemKind::LocalMemory.is_taken_by_driver());
    /// assert!(!MemKind::Vmm.is_taken_by_driver());
    /// ```
    pub const fn is_taken_by_driver(self) -> bool {
        self as u8 > Self::Part as u8
    }

    /// Returns whether the clock is read for each allocation of this kind. An allocation from a pool is cheaper than reading
    /// the clock; the others cost more.
    ///
    /// ```
    /// assert!(!gpumem::report::MemKind::Pool.needs_time());
    /// ```
    #[inline]
    #[doc(hidden)]
    pub const fn needs_time(self) -> bool {
        !matches!(self, Self::Pool | Self::Part)
    }
}

named!(MemKind);

/// Identifies a live block in its process. The key may be reused after the block is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

/// The kinds of numbers that identify blocks. Addresses are unique in a process, over all devices and the host, but a handle
/// may have the same value as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// An address of memory.
    Address,
    /// The handle of physical memory.
    Handle,
    /// The handle of an array.
    Array,
    /// The address of host memory that was registered.
    Registered,
    /// An id that gpumem chose, because the driver reports only the total memory of graphs.
    Graph,
    /// An id that gpumem chose for memory that the driver takes by itself.
    Driver,
}

impl Key {
    /// The key of no block.
    pub const NONE: Self = Self(u64::MAX);

    /// Returns the key as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the key of a number that [`get`](Self::get) returned.
    pub const fn from_raw(key: u64) -> Self {
        Self(key)
    }

    /// Creates a key. User space ends at 2^57, so the bits above can hold the kind.
    pub const fn new(space: Space, name: u64) -> Self {
        Self(name ^ ((space as u64) << 58))
    }

    /// Returns the key of the part of a pool that starts at this address.
    #[inline]
    pub const fn of_part(pool: PoolId, address: u64) -> Self {
        Self(address & Self::ADDRESS | ((pool.0 as u64 + Self::PARTS) << 58))
    }

    /// Returns whether this is the key of a part of a pool.
    #[inline]
    pub const fn is_part(self) -> bool {
        self.0 >> 58 >= Self::PARTS
    }

    /// Returns the pool of a part; [`PoolId::NONE`] if this is not the key of a part.
    pub const fn pool(self) -> PoolId {
        PoolId((self.0 >> 58).saturating_sub(Self::PARTS) as u8)
    }

    /// Returns whether this is an address that the driver returned.
    #[inline]
    pub const fn is_address(self) -> bool {
        self.0 >> 58 == Space::Address as u64
    }

    /// Returns the address in the key.
    #[inline]
    pub const fn address(self) -> u64 {
        self.0 & Self::ADDRESS
    }

    const ADDRESS: u64 = (1 << 58) - 1;
    /// The first value of the upper bits in keys of parts. Each pool has its own value.
    const PARTS: u64 = 8;
}

/// The id of a registered pool, starting at 1; 0 means no pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u8);

impl PoolId {
    /// No pool.
    pub const NONE: Self = Self(0);
    /// The largest id of a pool. The keys of parts have no bits for more.
    pub const LAST: Self = Self(54);
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The device that the block is on.
    pub device: Device,
    /// The size of the block.
    pub bytes: Bytes,
    /// The kind of memory.
    pub kind: MemKind,
    /// The context whose destruction frees the block, as numbered by the source; 0 if there is none.
    pub context: u8,
    /// The stack of the call that allocated the block.
    pub stack: StackId,
}

/// The properties of a block other than its size. They are packed into one word, which is passed in a register and compared in
/// one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// Returns the tag as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the tag of a number that [`get`](Self::get) returned.
    pub const fn from_raw(tag: u64) -> Self {
        Self(tag)
    }

    /// The tag of no block.
    pub const NONE: Self = Self(u64::MAX);

    /// Creates the tag of a block.
    #[inline]
    pub const fn new(device: Device, kind: MemKind, context: u8, stack: StackId) -> Self {
        let device = (device.ordinal as u64) << 48 | (device.family as u64) << 16;
        Self(device | (stack.0 as u64) << 20 | (context as u64) << 8 | kind as u64)
    }

    /// Returns the device.
    pub fn device(self) -> Device {
        let family = if self.0 & 1 << 16 == 0 { Family::Cuda } else { Family::Simulated };
        Device { family, ordinal: (self.0 >> 48) as u32 }
    }

    /// Returns the kind of memory.
    #[inline]
    pub const fn kind(self) -> MemKind {
        // A table would take one more cache line.
        match self.0 & 0xff {
            0 => MemKind::Device,
            1 => MemKind::Pool,
            2 => MemKind::Managed,
            3 => MemKind::PinnedHost,
            4 => MemKind::Vmm,
            5 => MemKind::Graph,
            7 => MemKind::Context,
            8 => MemKind::Modules,
            9 => MemKind::LocalMemory,
            10 => MemKind::Limits,
            11 => MemKind::Streams,
            12 => MemKind::ExecutableGraphs,
            13 => MemKind::PoolCache,
            14 => MemKind::SharedCalls,
            15 => MemKind::Earlier,
            16 => MemKind::NotKnown,
            _ => MemKind::Part,
        }
    }

    /// Returns whether the driver knows the block: true unless it is a part of a pool.
    #[inline]
    pub const fn is_of_driver(self) -> bool {
        !matches!(self.kind(), MemKind::Part)
    }

    /// Returns the context; see [`Block::context`].
    #[expect(clippy::cast_possible_truncation, reason = "only the bits of this part are kept")]
    pub const fn context(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns the stack of the call.
    #[expect(clippy::cast_possible_truncation, reason = "only the bits of this part are kept")]
    pub const fn stack(self) -> StackId {
        StackId((self.0 >> 20) as u32 & Self::MOST_STACKS)
    }

    /// A stack id has 28 bits, which is enough for all different stacks.
    const MOST_STACKS: u32 = (1 << 28) - 1;
}

impl Block {
    /// Creates a block with this size and tag.
    pub fn from_tag(bytes: Bytes, tag: Tag) -> Self {
        Self { device: tag.device(), bytes, kind: tag.kind(), context: tag.context(), stack: tag.stack() }
    }

    /// Returns the tag of the block.
    #[inline]
    pub const fn tag(&self) -> Tag {
        Tag::new(self.device, self.kind, self.context, self.stack)
    }

    /// Creates a block without a context and without a stack.
    pub const fn new(device: Device, bytes: Bytes, kind: MemKind) -> Self {
        Self { device, bytes, kind, context: 0, stack: StackId::NONE }
    }
}
