//! Observer access: scopes, filters, and the view that they form.
//!
//! Scopes select kinds of data, filters select a part of it. An [`ObserverView`] answers for the event stream with
//! [`ObserverView::sees_event`], and for reads over REST with the finer functions. Routes check their own scope on
//! entry; direct messages always require `dms:read` in addition.

mod required_scope;
mod token;

pub use token::ObserverToken;

use std::{fmt, str::FromStr};

use chrono::{DateTime, DurationRound, SecondsFormat, TimeDelta, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use self::required_scope::required_scope;
use crate::{
    AgentId, ChannelId,
    events::kind::{EventFacts, FILE_UPLOADED, has_channel_subject},
    names::{is_channel_name, strip_hash},
};

/// Maximum number of entries in each list of a filter.
pub const MAX_FILTER_ENTRIES: usize = 100;
/// Maximum length of a conversation id or event type in a filter, in bytes.
pub const MAX_FILTER_WORD_BYTES: usize = 64;
/// Maximum size of all filters of a token as JSON, in bytes. They are part of the token, which travels in URLs.
pub const MAX_FILTERS_BYTES: usize = 2048;

macro_rules! scopes {
    ($($(#[$doc:meta])* $variant:ident = $word:literal;)+) => {
        /// Kind of data that an observer may read. Written `<word>:read`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ObserverScope {
            $($(#[$doc])* $variant,)+
        }

        impl ObserverScope {
            /// Every scope, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the text form, such as `messages:read`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => concat!($word, ":read")),+ }
            }
        }
    };
}

scopes! {
    /// The live stream and the event log.
    Stream = "stream";
    /// Messages in channels.
    Messages = "messages";
    /// Replies in threads.
    Threads = "threads";
    /// Direct messages; they also require the filter `include_dms`.
    Dms = "dms";
    /// Channels and their members.
    Channels = "channels";
    /// Searches in messages.
    Search = "search";
    /// Agents and their status.
    Agents = "agents";
    /// Nodes and their status.
    Nodes = "nodes";
    /// Deliveries and their states.
    Deliveries = "deliveries";
    /// Activity, session events and actions.
    Activity = "activity";
    /// Files and their metadata.
    Files = "files";
    /// Reactions to messages.
    Reactions = "reactions";
}

/// Error for a text that is not a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a known scope")]
pub struct UnknownScope;

impl fmt::Display for ObserverScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ObserverScope {
    type Err = UnknownScope;

    fn from_str(text: &str) -> Result<Self, UnknownScope> {
        Self::ALL.iter().copied().find(|scope| scope.as_str() == text).ok_or(UnknownScope)
    }
}

/// Set of scopes. In JSON an array of their texts, each once, in a fixed order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ScopeSet(u16);

impl ScopeSet {
    /// Creates a set of exactly these scopes.
    #[must_use]
    pub const fn from_scopes(scopes: &[ObserverScope]) -> Self {
        let (mut bits, mut i) = (0, 0);
        // A constant function cannot iterate with `for`.
        while i < scopes.len() {
            bits |= 1 << scopes[i] as u16;
            i += 1;
        }
        Self(bits)
    }

    /// Returns the set of every scope.
    #[must_use]
    pub const fn all() -> Self {
        Self::from_scopes(ObserverScope::ALL)
    }

    /// Returns the set as a number, for const generics; [`ScopeSet::from_bits`] is the inverse.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Creates the set of a number from [`ScopeSet::bits`].
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & Self::all().0)
    }

    /// Returns whether the two sets have a scope in common.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether the scope is in the set.
    #[must_use]
    pub const fn contains(self, scope: ObserverScope) -> bool {
        self.0 & (1 << scope as u16) != 0
    }

    /// Returns whether the set has no scopes.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over the scopes in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = ObserverScope> {
        ObserverScope::ALL.iter().copied().filter(move |scope| self.contains(*scope))
    }
}

impl FromIterator<ObserverScope> for ScopeSet {
    fn from_iter<I: IntoIterator<Item = ObserverScope>>(scopes: I) -> Self {
        Self(scopes.into_iter().fold(0, |set, scope| set | 1 << scope as u16))
    }
}

impl fmt::Debug for ScopeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Serialize for ScopeSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(ObserverScope::as_str))
    }
}

impl<'de> Deserialize<'de> for ScopeSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<String>::deserialize(deserializer)?
            .iter()
            .map(|text| text.parse::<ObserverScope>().map_err(D::Error::custom))
            .collect()
    }
}

/// Filters of an observer. Absent means no limit; lists are never empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObserverFilters {
    /// Channels by id. A channel passes if this list or `channel_names` contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_ids: Option<Vec<ChannelId>>,
    /// Channels by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_names: Option<Vec<String>>,
    /// `true` shows direct messages. Absent means `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_dms: Option<bool>,
    /// Conversations; without effect unless `include_dms` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dm_conversation_ids: Option<Vec<String>>,
    /// Authors. With this filter, data without an author is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_ids: Option<Vec<AgentId>>,
    /// Kinds of events; applies to the stream and the event log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_types: Option<Vec<String>>,
    /// Lower bound of the creation time.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "milliseconds")]
    pub created_after: Option<DateTime<Utc>>,
}

/// Reason for refusing filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFilters {
    /// An empty list, which could mean "nothing" or "no limit".
    #[error("{0} must not be empty: leave it out to set no limit")]
    Empty(&'static str),
    /// More entries than [`MAX_FILTER_ENTRIES`].
    #[error("{0} must not have more than {MAX_FILTER_ENTRIES} entries")]
    TooMany(&'static str),
    /// An entry that can never match.
    #[error("{0} has an entry that cannot be one")]
    BadEntry(&'static str),
    /// Longer than [`MAX_FILTERS_BYTES`].
    #[error("filters must not be longer than {MAX_FILTERS_BYTES} bytes")]
    TooLong,
}

impl ObserverFilters {
    /// Validates filters sent by a client and normalises them: names without `#`, instants in whole milliseconds.
    ///
    /// # Errors
    /// If a list is empty or too long, an entry can never match, or the filters are too long together.
    pub fn into_validated(mut self) -> Result<Self, InvalidFilters> {
        let mut bytes = 64; // the braces, `include_dms` and `created_after`
        for name in self.channel_names.iter_mut().flatten() {
            *name = strip_hash(name).to_owned();
        }
        bytes += check_list("channel_ids", self.channel_ids.as_deref(), |_| true, |_| 20)?;
        bytes += check_list("channel_names", self.channel_names.as_deref(), |n| is_channel_name(n), String::len)?;
        bytes += check_list("dm_conversation_ids", self.dm_conversation_ids.as_deref(), |w| is_word(w), String::len)?;
        bytes += check_list("agent_ids", self.agent_ids.as_deref(), |_| true, |_| 20)?;
        bytes += check_list("event_types", self.event_types.as_deref(), |w| is_word(w), String::len)?;
        if bytes > MAX_FILTERS_BYTES {
            return Err(InvalidFilters::TooLong);
        }
        // As `milliseconds` writes them, so that the filters that are read from the token equal these.
        self.created_after = self.created_after.map(|at| at.duration_trunc(TimeDelta::milliseconds(1)).unwrap_or(at));
        Ok(self)
    }

    /// Returns whether only some channels are visible.
    #[must_use]
    pub const fn limits_channels(&self) -> bool {
        self.channel_ids.is_some() || self.channel_names.is_some()
    }
}

/// Validates a list and returns its size as JSON in bytes.
fn check_list<T>(
    field: &'static str,
    list: Option<&[T]>,
    fits: impl Fn(&T) -> bool,
    length: impl Fn(&T) -> usize,
) -> Result<usize, InvalidFilters> {
    let Some(list) = list else { return Ok(0) };
    match list.len() {
        0 => return Err(InvalidFilters::Empty(field)),
        1..=MAX_FILTER_ENTRIES => {}
        _ => return Err(InvalidFilters::TooMany(field)),
    }
    if !list.iter().all(fits) {
        return Err(InvalidFilters::BadEntry(field));
    }
    // 6: quotes, colon, brackets and comma of the list. 3: quotes and comma of an entry.
    Ok(field.len() + 6 + list.iter().map(|entry| length(entry) + 3).sum::<usize>())
}

fn is_word(text: &str) -> bool {
    (1..=MAX_FILTER_WORD_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
}

fn milliseconds<S: Serializer>(at: &Option<DateTime<Utc>>, serializer: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => serializer.collect_str(&at.to_rfc3339_opts(SecondsFormat::Millis, true)),
        None => serializer.serialize_none(),
    }
}

/// Facts of a message that decide whether an observer sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageFacts<'a> {
    /// Id of the channel, or of the backing channel of the conversation.
    pub channel_id: ChannelId,
    pub channel_name: &'a str,
    /// Id of the conversation, for direct messages.
    pub conversation_id: Option<&'a str>,
    /// Id of the author.
    pub agent_id: AgentId,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
}

/// Visible part of a workspace for one observer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObserverView {
    /// Visible kinds of data.
    pub scopes: ScopeSet,
    /// Filters within these kinds.
    pub filters: ObserverFilters,
}

impl ObserverView {
    /// Returns the view of a caller with the workspace key.
    #[must_use]
    pub fn unrestricted() -> Self {
        Self {
            scopes: ScopeSet::all(),
            filters: ObserverFilters { include_dms: Some(true), ..ObserverFilters::default() },
        }
    }

    /// Returns whether the observer has a scope.
    #[must_use]
    pub const fn has_scope(&self, scope: ObserverScope) -> bool {
        self.scopes.contains(scope)
    }

    /// Returns whether the event is visible on the observer's stream and in its event log. Does not check
    /// `stream:read`, which the routes check on entry.
    #[must_use]
    pub fn sees_event(&self, event: &EventFacts<'_>) -> bool {
        self.has_scope(required_scope(event.kind, event.conversation_id.is_some()))
            && self.filters.event_types.as_ref().is_none_or(|types| types.iter().any(|kind| kind == event.kind))
            && self.sees_event_place(event)
            && self.sees_author(event.agent_id)
            && self.sees_created_at(event.created_at)
    }

    fn sees_event_place(&self, event: &EventFacts<'_>) -> bool {
        match (event.conversation_id, event.channel_id, event.channel_name) {
            (Some(conversation), ..) => self.sees_conversation(conversation),
            // An event about direct messages that does not name the conversation.
            (None, ..) if required_scope(event.kind, false) == ObserverScope::Dms => {
                self.sees_direct_messages() && self.filters.dm_conversation_ids.is_none()
            }
            // Announced before it is attached to a message, which would decide.
            (None, None, None) if event.kind == FILE_UPLOADED => self.sees_every_message_place(),
            (None, None, None) => !self.filters.limits_channels() || !has_channel_subject(event.kind),
            (None, id, name) => self.lists_channel(id, name),
        }
    }

    /// Returns whether the filters let a channel pass.
    #[must_use]
    pub fn sees_channel(&self, id: ChannelId, name: &str) -> bool {
        self.lists_channel(Some(id), Some(name))
    }

    fn lists_channel(&self, id: Option<ChannelId>, name: Option<&str>) -> bool {
        let by_id = || self.filters.channel_ids.iter().flatten().any(|listed| Some(*listed) == id);
        let by_name = || self.filters.channel_names.iter().flatten().any(|listed| Some(listed.as_str()) == name);
        !self.filters.limits_channels() || by_id() || by_name()
    }

    /// Returns whether direct messages are visible at all: `dms:read` and `include_dms`.
    #[must_use]
    pub fn sees_direct_messages(&self) -> bool {
        self.has_scope(ObserverScope::Dms) && self.filters.include_dms == Some(true)
    }

    /// Returns whether messages are visible wherever they are: in every channel and every conversation.
    #[must_use]
    pub fn sees_every_message_place(&self) -> bool {
        !self.filters.limits_channels() && self.sees_direct_messages() && self.filters.dm_conversation_ids.is_none()
    }

    /// Returns whether a conversation and its messages are visible. Channel filters do not apply.
    #[must_use]
    pub fn sees_conversation(&self, id: &str) -> bool {
        let listed = |ids: &Vec<String>| ids.iter().any(|listed| listed == id);
        self.sees_direct_messages() && self.filters.dm_conversation_ids.as_ref().is_none_or(listed)
    }

    /// Returns whether the filters let an author pass. Data without an author passes only without an author filter.
    #[must_use]
    pub fn sees_author(&self, agent: Option<AgentId>) -> bool {
        self.filters.agent_ids.as_ref().is_none_or(|ids| agent.is_some_and(|agent| ids.contains(&agent)))
    }

    /// Returns whether the creation time is within the filter.
    #[must_use]
    pub fn sees_created_at(&self, at: DateTime<Utc>) -> bool {
        self.filters.created_after.is_none_or(|after| at >= after)
    }

    /// Returns whether a message is visible by place, author and age. The scope that a channel message requires depends
    /// on the route, which checks it.
    #[must_use]
    pub fn sees_message(&self, message: &MessageFacts<'_>) -> bool {
        let place = match message.conversation_id {
            Some(conversation) => self.sees_conversation(conversation),
            None => self.sees_channel(message.channel_id, message.channel_name),
        };
        place && self.sees_author(Some(message.agent_id)) && self.sees_created_at(message.created_at)
    }
}

#[cfg(test)]
#[path = "observer_tests.rs"]
mod tests;
