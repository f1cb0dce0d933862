//! The text that is typed for a message: a header that says where it comes from, and the body without keys.

use relay_verification::{
    echo::ExpectedEcho,
    sanitise::{TypingMode, quote_reserved_lines, sanitise_body, sanitise_sender},
};

use crate::mailbox::Message;

/// A message as it is typed.
#[derive(Debug, Clone)]
pub(super) struct TypedLine {
    /// The line without a reminder.
    pub(super) line: String,
    /// The echo that is expected of it.
    pub(super) expected: ExpectedEcho,
}

impl TypedLine {
    /// Builds `Relay message from <sender> [<id>]: <body>`. With an alias the id says which workspace it is of.
    pub(super) fn new(message: &Message, workspace_alias: Option<&str>, mode: TypingMode) -> Self {
        let name = message.author.name.strip_prefix("human:").unwrap_or(&message.author.name);
        let sender = sanitise_sender(name);
        let body = quote_reserved_lines(&sanitise_body(&message.body, mode));
        let event_id = sanitise_sender(&message.event_id);
        let context = workspace_alias.map_or_else(|| event_id.clone(), |alias| format!("{alias} / {event_id}"));
        let place = if message.target.starts_with('#') {
            format!(" in {}", sanitise_sender(&message.target))
        } else {
            String::new()
        };
        let line = format!("Relay message from {sender}{place} [{context}]: {body}");
        let expected = ExpectedEcho::new(&sender, &event_id, &body, &line);
        Self { line, expected }
    }
}

/// The text of a message for an agent without a terminal.
pub(crate) fn plain_line(message: &Message, workspace_alias: Option<&str>) -> String {
    TypedLine::new(message, workspace_alias, TypingMode::BracketedPaste).line
}
