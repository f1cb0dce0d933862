//! Values that callers give: sizes, bounds, identity of the terminal, and the program to start.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    num::NonZeroU16,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use crate::{Account, PtyError};

/// Rows and columns of a terminal, each from 1 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    rows: NonZeroU16,
    cols: NonZeroU16,
}

impl TerminalSize {
    /// Largest number of rows and of columns. A screen of this size takes 32 MiB.
    pub const MAX: u16 = 1000;

    /// Checks the bounds.
    pub fn new(rows: u16, cols: u16) -> Result<Self, PtyError> {
        match (NonZeroU16::new(rows), NonZeroU16::new(cols)) {
            (Some(valid_rows), Some(valid_cols)) if rows <= Self::MAX && cols <= Self::MAX => {
                Ok(Self { rows: valid_rows, cols: valid_cols })
            }
            _ => Err(PtyError::InvalidSize { rows, cols }),
        }
    }

    /// Rows, at least 1.
    pub fn rows(self) -> NonZeroU16 {
        self.rows
    }

    /// Columns, at least 1.
    pub fn cols(self) -> NonZeroU16 {
        self.cols
    }
}

impl Default for TerminalSize {
    /// 24 rows and 80 columns.
    fn default() -> Self {
        const ROWS: NonZeroU16 = NonZeroU16::new(24).expect("24 is not zero");
        const COLS: NonZeroU16 = NonZeroU16::new(80).expect("80 is not zero");
        Self { rows: ROWS, cols: COLS }
    }
}

/// A colour as a terminal reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rgb(pub u8, pub u8, pub u8);

/// Identity that the terminal reports when a program asks.
#[derive(Debug, Clone)]
pub struct TerminalProfile {
    /// Name and version in the answer to XTVERSION. Control characters are left out.
    pub name: String,
    /// Default text colour, the answer to OSC 10.
    pub foreground: Rgb,
    /// Default background colour, the answer to OSC 11. Programs choose a dark or a light theme by it.
    pub background: Rgb,
}

impl Default for TerminalProfile {
    fn default() -> Self {
        Self {
            name: concat!("relay-pty(", env!("CARGO_PKG_VERSION"), ")").into(),
            foreground: Rgb(0xe5, 0xe5, 0xe5),
            background: Rgb(0, 0, 0),
        }
    }
}

/// Bounds of queues and times. The defaults are the documented bounds.
#[derive(Debug, Clone)]
pub struct Limits {
    /// User input that waits in one terminal's write queue, in bytes. Callers wait for room beyond it.
    pub input_bytes: usize,
    /// Injections that wait in one terminal's write queue. Further ones are refused.
    pub injections: usize,
    /// Text of these injections together, in bytes. One larger injection is taken when no other waits.
    pub injection_bytes: usize,
    /// Answers to terminal queries that wait in one terminal's write queue, in bytes. Further ones are dropped.
    pub answer_bytes: usize,
    /// Time without progress after which a write is reported as stalled. It stays first in the queue.
    pub write_stall: Duration,
    /// Output of all terminals that consumers hold, in bytes. Beyond it no terminal is read.
    pub undelivered_output_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            input_bytes: 1 << 20,
            injections: 64,
            injection_bytes: 4 << 20,
            answer_bytes: 16 << 10,
            write_stall: Duration::from_secs(30),
            undelivered_output_bytes: 64 << 20,
        }
    }
}

/// Settings that all terminals of a host share.
#[derive(Debug, Clone)]
pub struct HostSettings {
    /// Environment variable that marks the processes of a terminal with [`SpawnRequest::marker`].
    pub marker_variable: OsString,
    /// Identity towards programs.
    pub profile: TerminalProfile,
    /// Bounds of queues and times.
    pub limits: Limits,
}

impl HostSettings {
    /// Default profile and bounds.
    pub fn new(marker_variable: impl Into<OsString>) -> Self {
        Self { marker_variable: marker_variable.into(), profile: TerminalProfile::default(), limits: Limits::default() }
    }
}

/// A program to start in a terminal of its own.
#[derive(Debug, Clone)]
pub struct SpawnRequest {
    /// Path, or a name that is searched in `PATH` of `environment`.
    pub program: OsString,
    /// Arguments after the program's name, each taken verbatim.
    pub args: Vec<OsString>,
    /// Working directory; that of this process when absent.
    pub working_directory: Option<PathBuf>,
    /// The whole environment; nothing is inherited beside it. The marker is added, and `TERM` when it is missing.
    /// `LINES` and `COLUMNS` should not be in it: programs take them for the size even after a resize.
    pub environment: BTreeMap<OsString, OsString>,
    /// Value of the marker variable, unique among all terminals ever started on this machine.
    pub marker: OsString,
    /// User as whom the program runs; that of this process when absent.
    pub account: Option<Arc<Account>>,
    /// Size of the terminal at the start.
    pub size: TerminalSize,
}

impl SpawnRequest {
    /// A program without arguments, with an empty environment, in a terminal of 24 rows and 80 columns.
    pub fn new(program: impl Into<OsString>, marker: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            working_directory: None,
            environment: BTreeMap::new(),
            marker: marker.into(),
            account: None,
            size: TerminalSize::default(),
        }
    }

    /// The environment that the program receives.
    pub(crate) fn complete_environment(&self, marker_variable: &OsStr) -> BTreeMap<OsString, OsString> {
        let mut environment = self.environment.clone();
        environment.entry("TERM".into()).or_insert_with(|| "xterm-256color".into());
        environment.insert(marker_variable.to_owned(), self.marker.clone());
        environment
    }
}
