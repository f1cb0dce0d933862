//! The one error type of the crate.

use std::{ffi::OsString, io, path::PathBuf};

/// Reason for a failed terminal operation.
#[derive(Debug, thiserror::Error)]
pub enum PtyError {
    /// A size outside 1 to 1000 rows and columns.
    #[error("a terminal of {rows} rows and {cols} columns is not supported, use 1 to 1000 of each")]
    InvalidSize {
        /// Requested rows.
        rows: u16,
        /// Requested columns.
        cols: u16,
    },
    /// The process cannot adopt orphans or watch its children.
    #[error("cannot prepare this process for hosting terminals: {0}")]
    PrepareHost(#[source] io::Error),
    /// Another host exists in this process.
    #[error("this process has a terminal host already, use that one")]
    AlreadyHosting,
    /// The host has begun to shut down.
    #[error("the host is shutting down, no terminal is started any more")]
    ShuttingDown,
    /// The kernel gave out no pseudo-terminal.
    #[error("cannot open a pseudo-terminal: {0}")]
    OpenTerminal(#[source] io::Error),
    /// The working directory does not exist or cannot be entered.
    #[error("cannot use the working directory {}: {source}", path.display())]
    WorkingDirectory {
        /// The directory of the request.
        path: PathBuf,
        /// Answer of the operating system.
        source: io::Error,
    },
    /// The program does not exist or cannot be executed.
    #[error("cannot execute {}: {source}", program.display())]
    Execute {
        /// The program of the request.
        program: OsString,
        /// Answer of the operating system.
        source: io::Error,
    },
    /// The program has ended or is being ended; its terminal takes no input.
    #[error("the program of this terminal has ended")]
    Ended,
    /// The write queue holds as many injections as it may.
    #[error("the write queue holds its maximum of injections, repeat after one was written")]
    InjectionQueueFull,
    /// Writing to the terminal or changing it failed.
    #[error("the terminal refused the operation: {0}")]
    Terminal(#[source] io::Error),
    /// The process table could not be read.
    #[error("cannot read the process table: {0}")]
    ProcessTable(#[source] io::Error),
}
