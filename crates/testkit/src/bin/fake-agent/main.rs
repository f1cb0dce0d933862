//! `fake-agent`: plays an agent's command line in a terminal, for tests of the broker. It notes every message that was
//! submitted to it in a file, one line each: its process id, a blank, and the text.

mod arguments;
mod confirmation;
mod late_echo;
mod misquotes;
mod processes;
mod screen;
mod submissions;

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Parser as _;
use rustix::{
    process::{Signal, getpid, kill_process},
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use tokio::signal::unix::{SignalKind, signal};

use arguments::{Arguments, Show};
use late_echo::LateEcho;
use screen::Screen;
use submissions::Submissions;

/// Time between two bursts of a flood.
const BURST_EVERY: Duration = Duration::from_millis(20);
/// Queries of the terminal: position, status, primary and secondary attributes.
const QUERIES: &str = "\x1b[6n\x1b[5n\x1b[c\x1b[>c";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut ignored = Vec::new();
    if arguments.ignore_signals {
        for kind in [SignalKind::hangup(), SignalKind::terminate()] {
            // A handler that does nothing. Unlike an ignored signal, children do not inherit it.
            ignored.push(signal(kind).context("ignore a signal")?);
        }
    }
    if arguments.child {
        processes::start_child()?;
    }
    if arguments.grandchild {
        processes::start_grandchild()?;
    }
    if arguments.flood > 0 {
        let rate = arguments.flood;
        std::thread::Builder::new().spawn(move || flood(rate)).context("start the flood")?;
    }
    tokio::task::spawn_blocking(move || Agent::new(arguments)?.serve()).await.context("serve")?
}

struct Agent {
    arguments: Arguments,
    screen: Screen,
    late: Option<LateEcho>,
    log: File,
    keys: Option<File>,
    /// The last message.
    earlier: String,
    count: usize,
}

impl Agent {
    fn new(arguments: Arguments) -> Result<Self> {
        if arguments.show != Show::Cooked {
            let stdin = io::stdin();
            let mut modes = tcgetattr(&stdin).context("read the terminal's modes")?;
            modes.make_raw();
            tcsetattr(&stdin, OptionalActions::Now, &modes).context("set the terminal's modes")?;
        }
        let log = append(&arguments.log)?;
        let keys = arguments.keys.as_deref().map(append).transpose()?;
        let (delay, is_split) = (Duration::from_millis(arguments.echo_ms), arguments.split);
        let late = (!delay.is_zero()).then(|| LateEcho::start(delay, move |text| print_text(text, is_split)));
        let late = late.transpose()?;
        Ok(Self { screen: Screen::new(arguments.fold), late, log, keys, earlier: String::new(), count: 0, arguments })
    }

    fn serve(mut self) -> Result<ExitCode> {
        pause(self.arguments.start_ms);
        match self.arguments.show {
            Show::Screen => self.print(&self.screen.open())?,
            Show::Cooked | Show::Raw => self.print("> ")?,
            Show::Mute => {}
        }
        if self.arguments.query {
            self.print(QUERIES)?;
        }
        let mut submissions = Submissions::new(self.arguments.show == Show::Cooked);
        let mut buffer = [0; 4096];
        loop {
            let length = io::stdin().read(&mut buffer).context("read the terminal")?;
            if length == 0 {
                return Ok(ExitCode::SUCCESS);
            }
            if let Some(keys) = &mut self.keys {
                keys.write_all(&buffer[..length]).context("note keys")?;
            }
            for text in submissions.on_bytes(&buffer[..length]) {
                self.submit(&text)?;
                if self.arguments.exit_after == Some(self.count) {
                    return Ok(self.end());
                }
            }
            if self.arguments.show == Show::Screen {
                self.print(&self.screen.draw(submissions.unfinished()))?;
            }
        }
    }

    fn submit(&mut self, text: &str) -> Result<()> {
        self.count += 1;
        let line = format!("{} {}\n", std::process::id(), text.replace('\n', "\\n"));
        self.log.write_all(line.as_bytes()).context("note a message")?;
        confirmation::confirm(&self.arguments, text)?;
        if self.arguments.quote {
            self.print(&misquotes::misquotes(text))?;
        }
        if self.arguments.quote_earlier {
            self.print(&misquotes::earlier_headers(&self.earlier))?;
            text.clone_into(&mut self.earlier);
        }
        let shown = match self.arguments.show {
            _ if !self.count.is_multiple_of(self.arguments.show_every) => String::new(),
            Show::Cooked => format!("got {}\r\n> ", self.count),
            Show::Raw => format!("{}\r\n> ", text.replace('\n', "\r\n")),
            Show::Screen => self.screen.submit(text),
            Show::Mute => String::new(),
        };
        match &self.late {
            Some(late) => late.print(shown),
            None => self.print(&shown),
        }
    }

    fn end(&self) -> ExitCode {
        if let Some(signal) = self.arguments.exit_signal.and_then(Signal::from_named_raw) {
            // The exit code says so if the signal cannot be sent.
            let _ = kill_process(getpid(), signal);
        }
        ExitCode::from(self.arguments.exit_code)
    }

    fn print(&self, text: &str) -> Result<()> {
        print_text(text, self.arguments.split)
    }
}

fn append(path: &Path) -> Result<File> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.with_context(|| format!("open {}", path.display()))
}

/// Writes a text, in pieces of one byte if it is split.
fn print_text(text: &str, is_split: bool) -> Result<()> {
    if is_split { text.as_bytes().chunks(1).try_for_each(print) } else { print(text.as_bytes()) }
}

fn print(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).context("write to the terminal")
}

/// Plays a program that is busy with something else.
fn pause(millis: u64) {
    if millis > 0 {
        #[expect(clippy::disallowed_methods, reason = "the delay is what is played, on a thread of its own")]
        std::thread::sleep(Duration::from_millis(millis));
    }
}

fn flood(rate: usize) {
    let line = format!("{}\r\n", "noise ".repeat(12));
    let began = Instant::now();
    let mut written: usize = 0;
    loop {
        #[expect(clippy::cast_possible_truncation, reason = "a number of bytes")]
        let due = (began.elapsed().as_secs_f64() * rate as f64) as usize;
        while written < due {
            if print(line.as_bytes()).is_err() {
                return;
            }
            written = written.saturating_add(line.len());
        }
        #[expect(clippy::disallowed_methods, reason = "a thread of its own, at a given rate")]
        std::thread::sleep(BURST_EVERY);
    }
}
