//! Pools: the program's own allocators, which take large blocks from the driver and hand out parts of them.
//!
//! The driver sees only the blocks. A pool that is registered and reports its parts is measured like the driver's own allocations: each
//! part counts in its scope, and the unused memory of the pool counts in no scope. A pool needs four calls:
//!
//! ```
//! use gpumem::{Bytes, GpuMemTrace, pool::Pool, sim::{SimBlock, SimGpu}};
//!
//! /// Gives out parts of one block, one after the other.
//! struct Arena {
//!     block: SimBlock,
//!     next: u64,
//!     pool: Pool,
//! }
//!
//! impl Arena {
//!     fn new(gpu: &SimGpu, bytes: Bytes) -> gpumem::Result<Self> {
//!         let pool = Pool::register("arena", gpu.ordinal())?;
//!         let block = gpu.alloc(bytes)?; // such as cuMemAlloc
//!         pool.set_reserved(bytes);
//!         Ok(Self { next: block.address(), block, pool })
//!     }
//!
//!     fn alloc(&mut self, bytes: Bytes) -> u64 {
//!         let address = self.next;
//!         assert!(address + bytes.get() <= self.block.address() + self.block.bytes().get(), "the arena is full");
//!         self.next += bytes.get();
//!         self.pool.allocated(address, bytes);
//!         address
//!     }
//!
//!     fn free(&mut self, address: u64) {
//!         self.pool.freed(address); // an arena uses no address twice
//!     }
//! }
//!
//! let gpu = SimGpu::install(Bytes::gib(16))?;
//! let trace = GpuMemTrace::with_ctx("train");
//! let mut arena = Arena::new(&gpu, Bytes::mib(256))?;
//! let _weights = arena.alloc(Bytes::mib(20));
//! let gradients = arena.alloc(Bytes::mib(100));
//! arena.free(gradients);
//! println!("{trace}"); // △Used Peaked MB:     20    100 (train)
//! let data = trace.data();
//! assert_eq!((data.used.mb(), data.peaked.mb()), (20, 100));
//! assert_eq!(data.driver.unwrap().used.mb(), 256); // the driver's view
//! println!("{}", gpumem::summary()); // … cache of arena: 236 MiB of 256 MiB
//! # let summary = gpumem::summary();
//! # assert_eq!(summary.pools[0].unused(), Some(Bytes::mib(236)));
//! # assert_eq!(summary.pools[0].wrong_calls(), 0);
//! # assert!(summary.to_string().contains("\ncache of arena: 236 MiB of 256 MiB\n"), "{summary}");
//! # Ok::<(), gpumem::Error>(())
//! ```
//!
//! Guards, lines, summaries, peaks, budgets and out-of-memory reports count parts of pools, and the driver's blocks that belong to no pool.
//! [`Trace::driver`](crate::Trace::driver) has the numbers for the driver's blocks.
//!
//! Frees of unknown parts, parts that are allocated twice, parts outside the pool's blocks, and parts in a freed block whose addresses the
//! driver reuses are counted as wrong calls: in [`Summary::pools`](crate::report::Summary::pools) by pool, and in
//! [`Trace::lost`](crate::Trace::lost).
//!
//! Under `gpumem run`, the recording contains the parts of pools that are registered during the recording.
//!
//! Pools in C and C++ use `gpumem.h` of the crate `gpumem-c`, which declares the same four functions.

pub use crate::session::Pool;
