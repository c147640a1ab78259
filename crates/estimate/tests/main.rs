//! Tests the public interface of the crate in one executable, because none of these tests needs a separate process.

mod answers;
mod combinations;
mod config;
mod counted;
mod errors;
mod files;
mod gguf;
mod measured;
mod modules;
mod recording;
