//! Terminals for command-line programs: pseudo-terminal, process tree, screen, ordered input and paced output.
//!
//! [`PtyHost`] starts programs and holds what all of them share. Each program has a [`Terminal`], through which
//! callers type, resize, look at the screen and end the process tree, and a stream of [`TerminalEvent`]s with its
//! output and its end. The crate knows no command-line program and none of our other crates. It runs on Linux only;
//! everything that depends on that is in the module `linux`.

mod driver;
mod error;
mod host;
mod input;
mod linux;
mod output;
mod screen;
mod settings;
mod terminal;
mod tree;

pub use error::PtyError;
pub use host::PtyHost;
pub use input::{Injection, LeadKeys, PasteStyle, WriteId, WriteReceipt, WriteTicket};
pub use linux::{Account, FileAccess, LineMode, ProcessIdentity};
pub use output::OutputChunk;
pub use screen::{InputModes, ScreenSnapshot, SnapshotFormat};
pub use settings::{HostSettings, Limits, Rgb, SpawnRequest, TerminalProfile, TerminalSize};
pub use terminal::{EventStream, Exit, ExitReport, InputStatus, Terminal, TerminalEvent};
pub use tree::{EndReport, Leftover, TreeUsage};
