//! [`DeadLetters`]: deliveries that failed permanently, with their content, until they are typed again or forgotten.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{api::types::DeadLetterEntry, mailbox::Message};

const REMEMBERED: usize = 500;
/// Bytes of all contents.
const REMEMBERED_BYTES: usize = 32 << 20;

/// A delivery that failed.
#[derive(Debug, Clone)]
pub(crate) struct DeadLetter {
    pub(crate) agent: String,
    pub(crate) message: Message,
    pub(crate) reason: &'static str,
    pub(crate) attempts: u32,
    /// Unix time in milliseconds.
    pub(crate) failed_at_ms: i64,
}

/// The last 500 failures.
#[derive(Debug, Default)]
pub(crate) struct DeadLetters {
    content: Mutex<Content>,
}

#[derive(Debug, Default)]
struct Content {
    letters: VecDeque<DeadLetter>,
    bytes: usize,
}

impl DeadLetters {
    /// Adds a failure; the oldest are forgotten.
    pub(crate) fn add(&self, letter: DeadLetter) {
        let mut content = self.lock();
        content.bytes += letter.message.len();
        content.letters.push_back(letter);
        while content.letters.len() > REMEMBERED || content.bytes > REMEMBERED_BYTES {
            let Some(oldest) = content.letters.pop_front() else { return };
            content.bytes -= oldest.message.len();
        }
    }

    /// All, oldest first.
    pub(crate) fn list(&self) -> Vec<DeadLetterEntry> {
        self.lock().letters.iter().map(DeadLetter::to_entry).collect()
    }

    /// Name of the agent that a delivery has failed for.
    pub(crate) fn agent_name(&self, delivery_id: &str) -> Option<String> {
        let content = self.lock();
        let letter = content.letters.iter().find(|letter| letter.message.delivery_id == delivery_id);
        letter.map(|letter| letter.agent.clone())
    }

    /// Takes the letter of a delivery that is typed again.
    pub(crate) fn take(&self, delivery_id: &str) -> Option<DeadLetter> {
        let mut content = self.lock();
        let index = content.letters.iter().position(|letter| letter.message.delivery_id == delivery_id)?;
        let letter = content.letters.remove(index)?;
        content.bytes -= letter.message.len();
        Some(letter)
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeadLetter {
    fn to_entry(&self) -> DeadLetterEntry {
        let message = &self.message;
        DeadLetterEntry {
            delivery_id: message.delivery_id.clone(),
            event_id: message.event_id.clone(),
            name: self.agent.clone(),
            from: message.author.name.clone(),
            target: message.target.clone(),
            body: message.body.clone(),
            thread_id: message.thread_id.clone(),
            reason: self.reason,
            attempts: self.attempts,
            failed_at_ms: self.failed_at_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(number: usize, body: &str) -> DeadLetter {
        let message = Message { delivery_id: number.to_string(), ..Message::example(body) };
        DeadLetter { agent: "ada".into(), message, reason: "verification_failed", attempts: 4, failed_at_ms: 0 }
    }

    #[test]
    fn the_newest_are_kept_within_both_bounds() {
        let letters = DeadLetters::default();
        (0..REMEMBERED + 2).for_each(|number| letters.add(letter(number, "x")));
        assert_eq!(letters.list().len(), REMEMBERED);
        assert_eq!((letters.agent_name("1"), letters.agent_name("2").as_deref()), (None, Some("ada")));
        assert!(letters.take("2").is_some_and(|letter| letter.message.body == "x"));
        assert!(letters.take("2").is_none() && letters.agent_name("2").is_none(), "it is taken once");
        let large = "x".repeat(REMEMBERED_BYTES / 2);
        (1000..1003).for_each(|number| letters.add(letter(number, &large)));
        assert_eq!(letters.list().len(), 1, "one large letter is within the bound, two with their names are not");
    }
}
