//! `fake-agent`: plays an agent's command line in a terminal, for tests of the broker. It notes every message that was
//! submitted to it in a file, one line each: its process id, a blank, and the text.

mod screen;
mod submissions;

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};

use screen::Screen;
use submissions::Submissions;

/// Time between two bursts of a flood.
const BURST_EVERY: Duration = Duration::from_millis(20);

/// How the program shows what is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Show {
    /// The kernel echoes lines, and the program reads whole ones.
    Cooked,
    /// The alternate screen is drawn again with every key: a boxed input line, wrapped, between old messages.
    Screen,
    /// Nothing is shown.
    Mute,
}

#[derive(Debug, Parser)]
struct Arguments {
    #[arg(value_enum)]
    show: Show,
    /// File for submitted messages.
    #[arg(long)]
    log: PathBuf,
    /// Bytes of output in a second that have nothing to do with messages.
    #[arg(long, default_value_t = 0)]
    flood: usize,
    /// Writes an ack file for each message whose reminder names one.
    #[arg(long)]
    ack: bool,
    /// Ends after so many messages.
    #[arg(long)]
    exit_after: Option<usize>,
    /// Exit code at that end.
    #[arg(long, default_value_t = 0)]
    exit_code: u8,
    /// SIGHUP and SIGTERM do not end it.
    #[arg(long)]
    ignore_signals: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut ignored = Vec::new();
    if arguments.ignore_signals {
        for kind in [SignalKind::hangup(), SignalKind::terminate()] {
            ignored.push(signal(kind).context("ignore a signal")?);
        }
    }
    if arguments.flood > 0 {
        let rate = arguments.flood;
        std::thread::Builder::new().spawn(move || flood(rate)).context("start the flood")?;
    }
    tokio::task::spawn_blocking(move || serve(&arguments)).await.context("serve")?
}

fn serve(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.show != Show::Cooked {
        let stdin = io::stdin();
        let mut modes = tcgetattr(&stdin).context("read the terminal's modes")?;
        modes.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &modes).context("set the terminal's modes")?;
    }
    let mut screen = Screen::new();
    if arguments.show == Show::Screen {
        print(&screen.open())?;
    } else {
        print("> ")?;
    }
    let log = OpenOptions::new().create(true).append(true).open(&arguments.log);
    let mut log = log.with_context(|| format!("open {}", arguments.log.display()))?;
    let mut submissions = Submissions::default();
    let (mut count, mut buffer) = (0, [0; 4096]);
    loop {
        let length = io::stdin().read(&mut buffer).context("read the terminal")?;
        if length == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        for text in submissions.on_bytes(&buffer[..length]) {
            count += 1;
            note(&mut log, &text)?;
            if arguments.ack {
                acknowledge(&text)?;
            }
            match arguments.show {
                Show::Cooked => print(&format!("got {count}\r\n> "))?,
                Show::Screen => print(&screen.submit(&text))?,
                Show::Mute => {}
            }
            if arguments.exit_after == Some(count) {
                return Ok(ExitCode::from(arguments.exit_code));
            }
        }
        if arguments.show == Show::Screen {
            print(&screen.draw(submissions.unfinished()))?;
        }
    }
}

fn note(log: &mut File, text: &str) -> Result<()> {
    let line = format!("{} {}\n", std::process::id(), text.replace('\n', "\\n"));
    log.write_all(line.as_bytes()).context("note a message")
}

/// Writes the ack file for the message whose ids follow the words `agent-relay-broker ack`.
fn acknowledge(text: &str) -> Result<()> {
    let Some((_, command)) = text.split_once("agent-relay-broker ack ") else { return Ok(()) };
    let mut words = command.split(|character: char| character.is_whitespace() || character == '`');
    let (Some(delivery_id), Some(event_id)) = (words.next(), words.next()) else { return Ok(()) };
    let folder = std::env::var_os("AGENT_RELAY_ACK_DIR").context("AGENT_RELAY_ACK_DIR is not set")?;
    let content =
        serde_json::json!({ "delivery_id": delivery_id, "event_id": event_id, "status": "received" }).to_string();
    let temporary = Path::new(&folder).join(format!(".{delivery_id}.tmp"));
    std::fs::write(&temporary, content).context("write an ack file")?;
    std::fs::rename(&temporary, Path::new(&folder).join(delivery_id)).context("publish an ack file")
}

fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("write to the terminal")
}

fn flood(rate: usize) {
    let line = format!("{}\r\n", "noise ".repeat(12));
    let began = Instant::now();
    let mut written = 0;
    loop {
        #[expect(clippy::cast_possible_truncation, reason = "a number of bytes")]
        let due = (began.elapsed().as_secs_f64() * rate as f64) as usize;
        while written < due {
            if print(&line).is_err() {
                return;
            }
            written += line.len();
        }
        #[expect(clippy::disallowed_methods, reason = "a thread of its own, at a given rate")]
        std::thread::sleep(BURST_EVERY);
    }
}
