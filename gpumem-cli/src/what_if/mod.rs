//! `gpumem what-if`: dry runs of one program with different settings, or replays of its requests, and what each would need.

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
