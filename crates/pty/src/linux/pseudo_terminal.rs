//! Pseudo-terminals: opening, size, line mode, and reads and writes that never block.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    io::Errno,
    pty::OpenptFlags,
    termios::{InputModes, LocalModes, OptionalActions, Winsize},
};

use crate::TerminalSize;

/// Bytes per read. The kernel hands out at most 4095 at a time; one read of this size therefore empties it.
const READ_BYTES: usize = 8 << 10;

/// Treatment of input by the kernel, before the program receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineMode {
    /// Input is collected into lines, with the kernel's editing keys; longer lines than 4095 bytes are cut.
    pub canonical: bool,
    /// The kernel echoes input. Programs switch it off for passwords, and full-screen programs echo by themselves.
    pub echo: bool,
}

/// Result of one pass over what the terminal has to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOutcome {
    /// Everything was read.
    Empty,
    /// The limit was reached; there may be more.
    More,
    /// No process has the terminal open.
    Closed,
}

/// Opens a pseudo-terminal of `size`: the side of this process, which never blocks, and the side of the program.
pub(crate) fn open(size: TerminalSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    // By descriptor, not by name: a name could lead elsewhere in another mount namespace.
    let program_side =
        rustix::pty::ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    set_size(&master, size)?;
    let mut attributes = rustix::termios::tcgetattr(&program_side)?;
    // Without it the kernel's erase key removes single bytes of a character.
    attributes.input_modes |= InputModes::IUTF8;
    rustix::termios::tcsetattr(&program_side, OptionalActions::Now, &attributes)?;
    // This side only: programs expect that their own reads and writes block.
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok((master, program_side))
}

/// Sets the window size; the kernel sends SIGWINCH to the foreground process group if it changed.
pub(crate) fn set_size(master: impl AsFd, size: TerminalSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows().get(), ws_col: size.cols().get(), ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

/// Reads the line mode that the program has set. On Linux the master side reports it.
pub(crate) fn line_mode(master: impl AsFd) -> io::Result<LineMode> {
    let modes = rustix::termios::tcgetattr(master)?.local_modes;
    Ok(LineMode { canonical: modes.contains(LocalModes::ICANON), echo: modes.contains(LocalModes::ECHO) })
}

/// Passes what can be read at once to `sink`, until it has taken `limit` bytes or more.
pub(crate) fn read_available(master: impl AsFd, limit: usize, mut sink: impl FnMut(&[u8])) -> io::Result<ReadOutcome> {
    let mut buffer = [0_u8; READ_BYTES];
    let mut taken = 0;
    while taken < limit {
        match rustix::io::read(&master, &mut buffer) {
            // EIO: every process that had the terminal open has closed it.
            Ok(0) | Err(Errno::IO) => return Ok(ReadOutcome::Closed),
            Ok(length) => {
                sink(&buffer[..length]);
                taken += length;
            }
            Err(Errno::AGAIN) => return Ok(ReadOutcome::Empty),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(ReadOutcome::More)
}

/// Writes as much of `bytes` as the terminal takes at once. 0: it is full.
pub(crate) fn write_available(master: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match rustix::io::write(&master, bytes) {
            Ok(written) => return Ok(written),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
