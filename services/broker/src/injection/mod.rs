//! Messages into a terminal. [`Pipeline`] is the pure state machine of one agent: messages, output and time go in,
//! [`Effect`]s come out, and the agent's task performs them. [`mod@line`] builds the text that is typed, [`readiness`]
//! recognises the moment of the first injection, [`keyboard`] leaves room for a person who types.

mod effect;
#[cfg(test)]
mod exit_tests;
mod keyboard;
mod line;
mod outstanding;
mod pipeline;
mod profile;
mod queue;
mod quotes;
mod readiness;
mod reminder;
#[cfg(test)]
mod tests;
mod verdict;
mod writing;

pub(crate) use effect::{Effect, Failure, Lead, Settlement, TypeRequest};
pub(crate) use line::{EXIT_WORD, plain_line};
pub(crate) use pipeline::{Pipeline, ScreenFacts};
pub(crate) use profile::Profile;
pub(crate) use queue::DeliveryMode;
pub(crate) use readiness::{Readiness, ReadySign, ends_in_prompt};
pub(crate) use verdict::AckAnswer;
