//! The errors of `FromStr`. All other functions return [`gpumem::Error`](crate::Error).

pub(crate) use gpumem_core::error::{Error, Kind, Result};
pub use gpumem_core::{
    export::ParseSinkError,
    model::{ParseBytesError, ParseGaugeError, ParseSourceError},
};
