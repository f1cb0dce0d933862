//! What an observer may see: scopes, filters and the view that they make together.
//!
//! Scopes say which kinds of data, filters say which part of it. A [`ObserverView`] answers for the
//! event stream with [`ObserverView::sees`], and for reads over REST with the finer functions; there the
//! scope of the route is checked at the door, except that direct messages always need `dms:read`.

use std::{fmt, str::FromStr};

use chrono::{DateTime, DurationRound, SecondsFormat, TimeDelta, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{
    AgentId, ChannelId,
    event::{EventFacts, concerns_a_channel, scope_of},
    names::{is_channel_name, strip_hash},
};

/// Entries in each list of a filter.
pub const MAX_FILTER_ENTRIES: usize = 100;
/// A conversation id or an event type in a filter, in bytes.
pub const MAX_FILTER_WORD_BYTES: usize = 64;
/// All filters of a token together, in bytes as JSON. They travel inside the token, which travels in URLs.
pub const MAX_FILTERS_BYTES: usize = 2048;

macro_rules! scopes {
    ($($(#[$doc:meta])* $variant:ident = $word:literal;)+) => {
        /// One kind of data that an observer may read. Written `<word>:read`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ObserverScope {
            $($(#[$doc])* $variant,)+
        }

        impl ObserverScope {
            /// Every scope, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// As clients write it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => concat!($word, ":read")),+ }
            }
        }
    };
}

scopes! {
    /// The live stream and the event log, at all.
    Stream = "stream";
    /// Messages in channels.
    Messages = "messages";
    /// Replies in threads.
    Threads = "threads";
    /// Direct messages; they need the filter `include_dms` besides.
    Dms = "dms";
    /// Channels and their members.
    Channels = "channels";
    /// Search.
    Search = "search";
    /// Agents and their status.
    Agents = "agents";
    /// Nodes.
    Nodes = "nodes";
    /// What becomes of deliveries.
    Deliveries = "deliveries";
    /// Activity, session events and actions.
    Activity = "activity";
    /// Files.
    Files = "files";
    /// Reactions.
    Reactions = "reactions";
}

/// The text names no scope.
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

/// A set of scopes. In JSON an array of their texts, each once, in a fixed order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ScopeSet(u16);

impl ScopeSet {
    /// Exactly these scopes.
    #[must_use]
    pub const fn of(scopes: &[ObserverScope]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < scopes.len() {
            bits |= 1 << scopes[i] as u16;
            i += 1;
        }
        Self(bits)
    }

    /// Every scope.
    #[must_use]
    pub const fn all() -> Self {
        Self::of(ObserverScope::ALL)
    }

    /// The set as a number, for constant parameters of types; [`ScopeSet::from_bits`] reads it.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The set of a number that [`ScopeSet::bits`] gave.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & Self::all().0)
    }

    /// Whether the two sets have a scope in common.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether the scope is in the set.
    #[must_use]
    pub const fn has(self, scope: ObserverScope) -> bool {
        self.0 & (1 << scope as u16) != 0
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The scopes, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = ObserverScope> {
        ObserverScope::ALL.iter().copied().filter(move |scope| self.has(*scope))
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

/// Which part of the data an observer may see. Absent means no limit; lists are never empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObserverFilters {
    /// Channels by id. A channel passes if this or `channel_names` lists it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_ids: Option<Vec<ChannelId>>,
    /// Channels by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_names: Option<Vec<String>>,
    /// Whether direct messages are shown at all. Absent: they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_dms: Option<bool>,
    /// Conversations; means nothing unless `include_dms` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dm_conversation_ids: Option<Vec<String>>,
    /// Authors. With it, what has no author is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_ids: Option<Vec<AgentId>>,
    /// Kinds of events; concerns the stream and the event log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_types: Option<Vec<String>>,
    /// Whatever was created before this instant is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "milliseconds")]
    pub created_after: Option<DateTime<Utc>>,
}

/// Why filters are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFilters {
    /// A list without entries, which could be meant as "nothing" or as "no limit".
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
    /// Filters as a client gave them, brought into their one form: names without `#`, instants in whole
    /// milliseconds.
    ///
    /// # Errors
    /// When a list is empty or too long, an entry could never match, or all of it is too long.
    pub fn checked(mut self) -> Result<Self, InvalidFilters> {
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
        self.created_after = self.created_after.map(|at| at.duration_trunc(TimeDelta::milliseconds(1)).unwrap_or(at));
        Ok(self)
    }

    /// Whether only some channels may be seen.
    #[must_use]
    pub const fn limits_channels(&self) -> bool {
        self.channel_ids.is_some() || self.channel_names.is_some()
    }
}

/// The bytes that a list takes as JSON.
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

/// Everything that decides whether an observer sees a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageFacts<'a> {
    /// Its channel, or the channel behind its conversation.
    pub channel_id: ChannelId,
    /// That channel's name.
    pub channel_name: &'a str,
    /// Its conversation, if it is a direct message.
    pub conversation_id: Option<&'a str>,
    /// Its author.
    pub agent_id: AgentId,
    /// When it was posted.
    pub created_at: DateTime<Utc>,
}

/// What an observer may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObserverView {
    /// Which kinds of data.
    pub scopes: ScopeSet,
    /// Which part of it.
    pub filters: ObserverFilters,
}

impl ObserverView {
    /// What the holder of a workspace's key sees.
    #[must_use]
    pub fn everything() -> Self {
        Self {
            scopes: ScopeSet::all(),
            filters: ObserverFilters { include_dms: Some(true), ..ObserverFilters::default() },
        }
    }

    /// Whether the observer has a scope.
    #[must_use]
    pub const fn has(&self, scope: ObserverScope) -> bool {
        self.scopes.has(scope)
    }

    /// Whether the event shows on the observer's stream and in its event log. `stream:read` is not asked
    /// for here: it is checked at the door.
    #[must_use]
    pub fn sees(&self, event: &EventFacts<'_>) -> bool {
        self.has(scope_of(event.kind, event.conversation_id.is_some()))
            && self.filters.event_types.as_ref().is_none_or(|types| types.iter().any(|kind| kind == event.kind))
            && self.sees_place_of(event)
            && self.sees_author(event.agent_id)
            && self.sees_created_at(event.created_at)
    }

    fn sees_place_of(&self, event: &EventFacts<'_>) -> bool {
        match (event.conversation_id, event.channel_id, event.channel_name) {
            (Some(conversation), ..) => self.sees_conversation(conversation),
            // A kind of direct message that does not say which conversation.
            (None, ..) if scope_of(event.kind, false) == ObserverScope::Dms => {
                self.sees_some_conversations() && self.filters.dm_conversation_ids.is_none()
            }
            (None, None, None) => !self.filters.limits_channels() || !concerns_a_channel(event.kind),
            (None, id, name) => self.lists_channel(id, name),
        }
    }

    /// Whether the filters let a channel pass.
    #[must_use]
    pub fn sees_channel(&self, id: ChannelId, name: &str) -> bool {
        self.lists_channel(Some(id), Some(name))
    }

    fn lists_channel(&self, id: Option<ChannelId>, name: Option<&str>) -> bool {
        let by_id = || self.filters.channel_ids.iter().flatten().any(|listed| Some(*listed) == id);
        let by_name = || self.filters.channel_names.iter().flatten().any(|listed| Some(listed.as_str()) == name);
        !self.filters.limits_channels() || by_id() || by_name()
    }

    /// Whether direct messages are seen at all: `dms:read` and `include_dms`.
    #[must_use]
    pub fn sees_some_conversations(&self) -> bool {
        self.has(ObserverScope::Dms) && self.filters.include_dms == Some(true)
    }

    /// Whether a conversation and its messages are seen. The channel filter does not concern it.
    #[must_use]
    pub fn sees_conversation(&self, id: &str) -> bool {
        let listed = |ids: &Vec<String>| ids.iter().any(|listed| listed == id);
        self.sees_some_conversations() && self.filters.dm_conversation_ids.as_ref().is_none_or(listed)
    }

    /// Whether the filters let an author pass. What has no author passes only where authors are not limited.
    #[must_use]
    pub fn sees_author(&self, agent: Option<AgentId>) -> bool {
        self.filters.agent_ids.as_ref().is_none_or(|ids| agent.is_some_and(|agent| ids.contains(&agent)))
    }

    /// Whether something created at that instant is young enough.
    #[must_use]
    pub fn sees_created_at(&self, at: DateTime<Utc>) -> bool {
        self.filters.created_after.is_none_or(|after| at >= after)
    }

    /// Whether a message is seen: its place, its author and its age. Which scope a channel's message needs
    /// depends on the route and is checked there.
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
