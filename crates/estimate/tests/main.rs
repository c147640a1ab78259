//! Tests the public interface of the crate in one executable: none of these tests needs a process of its own.

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
