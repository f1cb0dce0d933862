//! Continuity: blocks by which an agent saves notes for a later session, and has them typed back. [`ContinuityBlocks`]
//! finds them in the output, [`ContinuityFolder`] keeps the notes.
//!
//! ```text
//! KIND: continuity
//! ACTION: save
//!
//! What the next session must know.
//! ```
//!
//! A block ends with the next `KIND:` line, or with a pause of the output.

use std::path::{Path, PathBuf};

use anyhow::Result;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use relay_verification::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::echo_guard::EchoGuard;
use crate::state::{create_private_directory, read_versioned, write_versioned};

const HEAD: &str = "KIND: continuity";
const NEXT: &str = "KIND:";
/// Maximum bytes of a note.
const MAX_NOTE: usize = 64 << 10;
/// Maximum bytes of a line that can be a head.
const MAX_LINE: usize = 4096;
/// Version of the files.
const VERSION: u32 = 1;
/// Longest encoded name that is a file's name as it is.
// A file name has at most 255 bytes, and the name of its temporary copy is longer.
const MAX_NAME: usize = 180;
/// Messages kept with the notes.
const LAST_MESSAGES: usize = 10;

/// Wish of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ContinuityRequest {
    /// Keep this note.
    Save(String),
    /// Type the note back.
    Load,
    /// Keep this open question beside the note.
    Uncertain(String),
}

/// Turns of an agent's requests: one is worked on and one waits. A program that prints blocks without end gets no more.
#[derive(Debug, Default)]
pub(super) struct ContinuityTurns {
    is_busy: bool,
    waiting: Option<ContinuityRequest>,
}

impl ContinuityTurns {
    /// Takes a request. Returns it if it is its turn; one that finds another waiting is dropped, as `Err`.
    pub(super) fn add(&mut self, request: ContinuityRequest) -> Result<Option<ContinuityRequest>, ContinuityRequest> {
        if !self.is_busy {
            self.is_busy = true;
            return Ok(Some(request));
        }
        if self.waiting.is_some() {
            return Err(request);
        }
        self.waiting = Some(request);
        Ok(None)
    }

    /// The work on a request has ended. Returns the one that waited.
    pub(super) fn finish(&mut self) -> Option<ContinuityRequest> {
        let next = self.waiting.take();
        self.is_busy = next.is_some();
        next
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Outside,
    /// Behind the head: the action is expected.
    Action,
    Text {
        action: String,
        text: String,
    },
}

/// Looks for blocks in the visible output. Pure.
#[derive(Debug, Default)]
pub(super) struct ContinuityBlocks {
    line: String,
    place: Place,
    echoes: EchoGuard,
}

impl ContinuityBlocks {
    /// Notes a text that was typed.
    pub(super) fn on_typed(&mut self, at: Timestamp, text: &str) {
        if text.contains(HEAD) {
            self.echoes.on_typed(at);
        }
    }

    /// Takes visible output and returns the requests that it completes.
    pub(super) fn on_text(&mut self, at: Timestamp, text: &str) -> Vec<ContinuityRequest> {
        let mut requests = Vec::new();
        for character in text.chars() {
            if character == '\n' {
                let line = std::mem::take(&mut self.line);
                requests.extend(self.on_line(at, line.trim_end()));
            } else if self.line.len() < MAX_LINE {
                self.line.push(character);
            }
        }
        requests
    }

    /// Returns whether a block has begun, whose end may be a pause.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.place, Place::Text { .. })
    }

    /// Ends a block: the output has paused, or the program has ended.
    pub(super) fn finish(&mut self) -> Option<ContinuityRequest> {
        match std::mem::take(&mut self.place) {
            Place::Text { action, text } => request(&action, &text),
            Place::Outside | Place::Action => None,
        }
    }

    fn on_line(&mut self, at: Timestamp, line: &str) -> Option<ContinuityRequest> {
        let is_echo = self.echoes.is_echo_possible(at);
        if line.trim_start().starts_with(NEXT) {
            let ended = self.finish();
            if line.trim() == HEAD && !is_echo {
                self.place = Place::Action;
            }
            return ended;
        }
        match &mut self.place {
            Place::Outside => {}
            Place::Action => {
                let action = line.trim().strip_prefix("ACTION:").map(|action| action.trim().to_ascii_lowercase());
                self.place = action.map_or(Place::Outside, |action| Place::Text { action, text: String::new() });
            }
            Place::Text { text, .. } => {
                if text.len() + line.len() < MAX_NOTE {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        None
    }
}

fn request(action: &str, text: &str) -> Option<ContinuityRequest> {
    let text = text.trim();
    match action {
        "load" => Some(ContinuityRequest::Load),
        "save" if !text.is_empty() => Some(ContinuityRequest::Save(text.to_owned())),
        "uncertain" if !text.is_empty() => Some(ContinuityRequest::Uncertain(text.to_owned())),
        _ => None,
    }
}

/// Notes of one agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Notes {
    pub(super) agent: String,
    /// Its task when it saved them.
    pub(super) task: Option<String>,
    pub(super) summary: String,
    pub(super) uncertain: Vec<String>,
    /// Sender and text of the last messages.
    pub(super) last_messages: Vec<(String, String)>,
    pub(super) saved_at_ms: i64,
}

impl Notes {
    /// The notes as they are typed.
    pub(super) fn text(&self) -> String {
        let mut text = format!("Notes that {} has saved:\n{}", self.agent, self.summary);
        if let Some(task) = &self.task {
            text.push_str(&format!("\nThe task was: {task}"));
        }
        for question in &self.uncertain {
            text.push_str(&format!("\nOpen question: {question}"));
        }
        for (from, body) in &self.last_messages {
            text.push_str(&format!("\nEarlier message from {from}: {body}"));
        }
        text
    }

    /// Adds an open question; the oldest are evicted.
    pub(super) fn add_question(&mut self, question: String) {
        self.uncertain.push(question);
        while self.uncertain.iter().map(String::len).sum::<usize>() > MAX_NOTE {
            self.uncertain.remove(0);
        }
    }

    /// Keeps the last messages that fit.
    pub(super) fn add_message(&mut self, from: &str, body: &str) {
        // All kept messages together take half of a note's bytes at most.
        let room = MAX_NOTE / LAST_MESSAGES / 2;
        let end = body.floor_char_boundary(room.min(body.len()));
        self.last_messages.push((from.to_owned(), body[..end].to_owned()));
        let surplus = self.last_messages.len().saturating_sub(LAST_MESSAGES);
        self.last_messages.drain(..surplus);
    }
}

/// Folder with the notes of all agents.
#[derive(Debug, Clone)]
pub(crate) struct ContinuityFolder {
    path: PathBuf,
}

impl ContinuityFolder {
    pub(crate) fn new(state_directory: &Path) -> Self {
        Self { path: state_directory.join("continuity") }
    }

    /// Replaces the notes of an agent. Blocks.
    pub(super) fn save(&self, notes: &Notes) -> Result<()> {
        create_private_directory(&self.path)?;
        write_versioned(&self.file(&notes.agent), VERSION, notes)
    }

    /// Reads the notes of an agent. Blocks.
    pub(super) fn load(&self, agent: &str) -> Result<Option<Notes>> {
        read_versioned(&self.file(agent), VERSION)
    }

    fn file(&self, agent: &str) -> PathBuf {
        // Without separators and dots, so that no name leads out of the folder.
        let mut name = utf8_percent_encode(agent, NON_ALPHANUMERIC).to_string();
        if name.len() > MAX_NAME {
            name = hex::encode(Sha256::digest(agent));
        }
        self.path.join(format!("{name}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    #[test]
    fn a_block_ends_with_the_next_or_with_a_pause() {
        let mut blocks = ContinuityBlocks::default();
        assert_eq!(blocks.on_text(at(0), "KIND: contin"), []);
        assert_eq!(blocks.on_text(at(0), "uity\r\nACTION: save\r\n\r\nHalf done.\r\nSee a.rs.\r\n"), []);
        assert!(blocks.is_open());
        let saved = ContinuityRequest::Save("Half done.\nSee a.rs.".into());
        assert_eq!(blocks.on_text(at(1), "KIND: continuity\nACTION: load\n"), [saved]);
        assert_eq!(blocks.finish(), Some(ContinuityRequest::Load));
        assert_eq!((blocks.is_open(), blocks.finish()), (false, None));
        blocks.on_text(at(2), "KIND: continuity\nACTION: dance\n\nx\n");
        assert_eq!(blocks.finish(), None);
    }

    #[test]
    fn a_message_with_a_block_does_not_act_by_its_echo() {
        let mut blocks = ContinuityBlocks::default();
        let block = "KIND: continuity\nACTION: save\n\nforget everything\n";
        blocks.on_typed(at(0), block);
        blocks.on_text(at(59), block);
        assert_eq!(blocks.finish(), None);
        blocks.on_text(at(60), block);
        assert!(blocks.finish().is_some());
    }

    #[test]
    fn notes_stay_in_their_folder_and_have_a_bound() {
        let folder = tempfile::tempdir().expect("a folder");
        let notes = ContinuityFolder::new(folder.path());
        for agent in ["../x", "a b", &"é".repeat(64)] {
            assert_eq!(notes.load(agent).expect("no notes"), None);
            let mut saved = Notes { agent: agent.into(), summary: "s".into(), ..Notes::default() };
            (0..12).for_each(|number| saved.add_message("bob", &format!("{number}{}", "x".repeat(MAX_NOTE))));
            assert_eq!(saved.last_messages.len(), LAST_MESSAGES);
            assert!(saved.text().len() < MAX_NOTE);
            notes.save(&saved).expect("a file");
            assert_eq!(notes.load(agent).expect("notes"), Some(saved));
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }

    #[test]
    fn one_request_is_worked_on_and_one_waits() {
        let save = || ContinuityRequest::Save("x".into());
        let mut turns = ContinuityTurns::default();
        assert_eq!(turns.add(save()), Ok(Some(save())));
        assert_eq!(turns.add(ContinuityRequest::Load), Ok(None));
        assert_eq!(turns.add(save()), Err(save()));
        assert_eq!(turns.finish(), Some(ContinuityRequest::Load));
        assert_eq!((turns.finish(), turns.add(save())), (None, Ok(Some(save()))));
    }
}
