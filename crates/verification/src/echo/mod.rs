//! [`EchoMonitor`]: has a message appeared in its agent's output since it was typed?
//!
//! The caller feeds the text of a [`Cleaner`](crate::cleaning::Cleaner) and begins a watch with an [`ExpectedEcho`]
//! for each injection. All watches of an agent share one `window` of text, reduced to the characters that layout
//! does not change ([`squash`]). A `search` looks for the event id first, then for the line or for sender and words,
//! and judges them together. A wrong match loses a message and a missing one costs a retry: in doubt nothing matches.

mod expected;
mod monitor;
mod search;
mod squash;
mod window;

pub use expected::ExpectedEcho;
pub use monitor::{EchoMatch, EchoMonitor, MAX_WATCHES, WatchId};
pub use search::MatchDetail;
pub use squash::squash;
pub use window::WINDOW_BYTES;
