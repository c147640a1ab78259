//! Memory of [burn](https://burn.dev) by scope.
//!
//! burn's runtime, cubecl, allocates pages from the driver and divides them among tensors. The driver only sees the pages, so this crate
//! asks cubecl. `scope` reports the exact memory that its code left in use, and bounds for its peak. The peak is not exact because cubecl
//! only reports its reservations, which [`layer`] receives, and not its frees.
//!
//! ```ignore
//! tracing_subscriber::registry().with(gpumem_burn::layer()).init();
//! let output = gpumem_burn::scope(&device, "forward", || model.forward(input));
//! println!("{}", gpumem_burn::summary(&device).unwrap());
//! ```
//!
//! A peak with `≤` is an upper bound, and one with `≥` is a lower bound. A peak without a sign is exact, for example because the code freed
//! nothing before the end.

#[cfg(feature = "burn")]
mod device;
#[cfg_attr(not(any(feature = "burn", test)), expect(dead_code, reason = "burn's devices are its users"))]
mod reservations;
#[cfg_attr(not(feature = "burn"), expect(dead_code, reason = "burn's devices are its users"))]
mod scopes;
mod summary;

#[cfg(feature = "burn")]
pub use device::{scope, summary};
pub use reservations::layer;
pub use scopes::Peak;
pub use summary::{CallMemory, Calls, Row, Summary};
