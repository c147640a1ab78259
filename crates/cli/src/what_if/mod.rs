//! Finds out what a program needs with different settings, for `gpumem what-if`: by running it dry with each setting,
//! or by replaying its requests.

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
