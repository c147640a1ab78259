//! Plain data. All other modules may use it; it uses `std` only.

/// Declares the error for a text that cannot be parsed. Its message contains the text and the allowed values.
macro_rules! parse_error {
    ($(#[$doc:meta])* $name:ident: $message:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name(String);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!("{} ", $message), $crate::model::quoted(&self.0))
            }
        }

        impl std::error::Error for $name {}
    };
}
pub(crate) use parse_error;

/// Implements `Display`, which writes the name, and `FromStr`, which parses the names of the listed values.
macro_rules! named {
    ($type:ident) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
    ($type:ident from $($value:ident),* else $error:ident) => {
        named!($type);

        impl std::str::FromStr for $type {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                let known = [$(Self::$value),*].into_iter().find(|value| text.trim().eq_ignore_ascii_case(value.name()));
                known.ok_or_else(|| $error(text.to_owned()))
            }
        }
    };
}

mod attribution;
mod block;
mod bytes;
mod callsite;
mod custom;
mod device;
mod event;
mod frame;
mod function;
mod gauge;
mod hash;
mod label;
mod mapped;
mod memory;
mod printable;
mod process;
mod source;
mod tensor_pool;
mod threads;
mod trace;

pub use attribution::{
    Call, Phase, calls, is_driver, is_gpumem_c, library, program_frames, readable_frames, torch_operation, user_line,
};
pub(crate) use attribution::{backward_operation, phase};
pub use block::{Block, Key, MemKind, PoolId, Space, Tag};
pub use bytes::{ByteDelta, Bytes, ParseBytesError};
pub use callsite::{CallsiteId, StackId};
pub use custom::{CustomGauge, InUse};
pub use device::{Device, Family};
pub use event::{Answer, Counted, Event, EventKind, OwnerThread, ScopeId, ScopeSpec, ThreadId, Time};
pub use frame::Frame;
pub use function::{ShortNames, alike, name_in_line, short_name};
pub use gauge::{DriverGauge, Gauge, ParseGaugeError, Sampling};
pub use hash::{GOLDEN, NumberHashBuilder};
pub use label::{Label, Shape};
pub use mapped::MappedPages;
pub use memory::{GpuMemory, PoolUsage};
pub use printable::{bounded, is_printable, one_line, quoted};
pub use process::{GpuProcess, ProcessKind};
pub use source::{ParseSourceError, Source};
pub use tensor_pool::TensorPool;
pub use threads::{ThreadName, Threads};
pub use trace::{DriverUsage, Trace};
