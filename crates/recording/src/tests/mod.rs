//! Tests recordings through the public interface of the crate: written items are read back, and damaged or hostile files do
//! no harm.

mod content;
mod example;
mod hostile;
mod pools;
mod round_trip;
