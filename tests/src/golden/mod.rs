//! Golden files: what the engine has sent to clients, kept under `tests/golden/` and compared byte by byte.
//!
//! A [`Recording`] collects the traffic that passes its [`Tap`]s, proxies in front of gateways, and the calls that a
//! test's receiver got. It becomes lines in one of two ways:
//!
//! - [`Recording::transcript`], for tests that always do the same: requests, answers with their headers, frames and
//!   calls as they are. Only values that differ between runs are replaced by placeholders (see [`mask`]), and equal
//!   values by equal placeholders.
//! - [`Recording::shapes`], for the published clients: the keys of each object that the engine sent, in order, and
//!   the kinds of their values.
//!
//! [`compare`] holds the lines against a file. A line that begins with `?` is one that not every run yields; all
//! others must appear, and no others may. Order and repetition do not count.
//!
//! To record again, for example after a new field was added:
//! `RELAY_GOLDEN=write cargo xtask test -p relay-acceptance --test golden --test clients` writes the files as one run
//! gives them. Then the same with `merge`, some times and once on a busy machine, adds new lines and marks those that
//! a run did not yield.

mod file;
mod http;
pub mod mask;
mod recording;
mod shape;
mod tap;
mod transcript;

pub use file::compare;
pub use recording::Recording;
pub use tap::{Tap, Tapped};
