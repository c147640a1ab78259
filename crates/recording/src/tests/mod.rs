//! Tests recordings through the public interface of the crate: written items are read back, a recording yields the reports of
//! the program, and damaged or hostile files do no harm.

mod example;
mod hostile;
mod pools;
mod replay;
mod round_trip;
