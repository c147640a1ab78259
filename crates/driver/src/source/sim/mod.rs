//! Simulated devices: GPU memory without a GPU. Every allocation is recorded.

mod devices;
mod gpu;

pub(super) use self::devices::select;
pub use self::gpu::{SimBlock, SimGpu};
pub use self::{devices::SimDevices, gpu::RecordSimulated};
