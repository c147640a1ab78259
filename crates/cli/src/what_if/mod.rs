//! Finds out what a program needs with different settings, for `gpumem what-if`: by running it dry with each setting,
//! or by replaying its requests.

mod answer;
mod dry;
mod dry_run;
mod recorded;
mod replay;
mod requests;
mod search;

pub(crate) use self::{
    answer::unknown_values,
    dry::{Question, ask, largest},
    replay::ask as ask_recording,
};
