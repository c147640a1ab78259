//! Runs one program dry with different settings, or replays its requests, to find the needs of each setting, for `gpumem
//! what-if`.

mod answer;
mod dry;
mod recorded;
mod replay;
mod requests;
mod search;
mod trial;

pub(crate) use self::{
    dry::{Question, ask, largest},
    replay::ask as ask_recording,
};
