//! Identifies accounts.

use crate::model::OwnerThread;

/// Identifies an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AccountId {
    /// The thread, or the task.
    pub(super) of: OwnerThread,
    /// The meter of the device.
    pub(super) meter: u16,
    /// True if threads in no scope count as well.
    pub(super) counts_unscoped: bool,
}
