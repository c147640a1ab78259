//! Turns driver calls into events: allocations with their device, and frees. The dispatch table and CUPTI share this module.
//!
//! The code runs in a hook or a callback, on the thread that makes the call. The device of a call follows from earlier calls; [`state`]
//! stores their contexts, streams, pools and properties. The driver is asked for the rest: the device of a context, of an older stream or
//! of an older pool, and the size of a block that is freed and that was allocated before the subscription.

mod blocks;
mod captures;
mod contexts;
#[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod dry_run;
mod events;
mod frees;
mod graphs;
mod handles;
mod observer;
mod own_memory;
mod owners;
mod record;
mod rejections;
mod rows;
mod state;
mod subscription;

pub(super) use self::own_memory::{compare, compare_all, read_pools};
pub(super) use self::subscription::{can_subscribe, poll, subscribe, subscribe_to, subscribed, unsubscribe};
