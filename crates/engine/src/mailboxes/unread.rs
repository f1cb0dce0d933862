//! Unread messages of agents as they were last read ([`UnreadState`]), so that an inbox reads again only what may have
//! changed since. Used by `inbox.rs`.
//!
//! A state is never served without a comparison with storage. One statement reads the marks of an agent: the head of
//! the workspace's event log, the ack floor and the last-read pointers. Every message, edit, reaction and archiving
//! takes its event in its own transaction, under the lock of the head. While the marks are the same, nothing has
//! changed. If the head has moved, the events since name the channels to be counted again. What changes without an
//! event is handled apart: retention removes old messages, so channels with old unread messages are counted each time,
//! and a recovery reinserts messages, so a state belongs to one recovery epoch. A server that took over may assign the
//! same event seqs again, so a state belongs to one start of a Postgres server, too.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use chrono::{DateTime, Days, Utc};
use moka::sync::Cache;
use relay_domain::{
    AgentId, ChannelId, MessageId, WorkspaceId, WorkspaceScope,
    events::{EventBody, EventSeq},
    mailboxes::inbox::{Mention, ReadPointer, ReceivedReaction, UnreadChannel},
    snowflake,
};
use relay_store::{
    events::RecordedEvents,
    mailboxes::inbox::{CountedChannel, ReadMarks},
};

use super::{Mailboxes, inbox::MAX_SHOWN};
use crate::{EngineResult, access::callers::AgentCaller, maintenance::Retention};

/// Bound of all states.
const CACHED_BYTES: u64 = 32 * 1024 * 1024;
/// Time after its last use for which a state is kept.
const IDLE: Duration = Duration::from_secs(600);
/// Maximum number of events that are searched for changes. After more of them, everything is read again.
const MAX_EVENTS: i64 = 200;
/// Bytes of one entry of a state: a channel, a mention or a reaction.
const ENTRY_BYTES: usize = 256;

/// Unread messages of an agent, and reactions to its messages.
#[derive(Debug)]
pub(super) struct UnreadState {
    /// Recovery epoch of the database.
    epoch: Option<i64>,
    /// Marks from before the rest was read, so that later changes show in later marks.
    marks: ReadMarks,
    /// Name by which messages mention the agent.
    name: Arc<str>,
    counted: HashMap<ChannelId, CountedChannel>,
    /// Channels and conversations with unread messages, those with the newest ones first.
    pub(super) unread: Vec<UnreadChannel>,
    pub(super) mentions: Vec<Mention>,
    pub(super) reactions: Vec<ReceivedReaction>,
    /// Oldest of all these messages.
    oldest_id: Option<MessageId>,
}

impl UnreadState {
    /// Returns whether the events since lead from this state to the one of these marks.
    fn precedes(&self, epoch: Option<i64>, now: &ReadMarks, name: &str) -> bool {
        self.epoch == epoch && self.marks.server_started_at == now.server_started_at && &*self.name == name
    }

    /// Returns whether nothing has changed since. Messages from `kept_from` on are not removed.
    fn is_current(&self, now: &ReadMarks, kept_from: MessageId) -> bool {
        self.marks == *now && now.are_complete() && self.oldest_id.is_none_or(|oldest| oldest >= kept_from)
    }

    fn bytes(&self) -> usize {
        let entries = self.counted.len() + self.unread.len() + self.mentions.len() + self.reactions.len();
        (1 + entries) * ENTRY_BYTES + self.marks.bytes()
    }
}

/// States of the agents that have read their inbox recently. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct UnreadCache(Cache<(WorkspaceId, AgentId), Arc<UnreadState>>);

impl Default for UnreadCache {
    fn default() -> Self {
        let weigh = |_: &_, state: &Arc<UnreadState>| u32::try_from(state.bytes()).unwrap_or(u32::MAX);
        Self(Cache::builder().max_capacity(CACHED_BYTES).weigher(weigh).time_to_idle(IDLE).build())
    }
}

/// Changes that events name.
#[derive(Debug, Default)]
struct Changes {
    channels: HashSet<ChannelId>,
    conversations: HashSet<String>,
    /// Something else than a post or an edit happened, perhaps a reaction.
    has_others: bool,
}

impl Changes {
    /// Collects those of the events from seq `first` to the head. `None` if the records do not hold them all.
    fn collect(records: Vec<RecordedEvents>, first: EventSeq, head: EventSeq) -> Option<Self> {
        let is_complete = records.first().is_some_and(|record| record.first_seq <= first)
            && records.last().is_some_and(|record| {
                i64::try_from(record.events.len()).is_ok_and(|count| record.first_seq + count >= head)
            });
        if !is_complete {
            return None;
        }
        let mut changes = Self::default();
        for event in records.into_iter().flat_map(|record| record.events) {
            changes.channels.extend(event.channel_id);
            changes.conversations.extend(event.conversation_id);
            changes.has_others |= matches!(event.body, EventBody::Data(_));
        }
        Some(changes)
    }

    fn contains(&self, pointer: &ReadPointer) -> bool {
        self.channels.contains(&pointer.channel_id)
            || pointer.conversation_id.as_ref().is_some_and(|id| self.conversations.contains(id.as_str()))
    }
}

/// State of an agent that was read before, and the changes since.
struct EarlierState<'a> {
    state: &'a UnreadState,
    changes: &'a Changes,
    /// Messages from here on are not removed.
    kept_from: MessageId,
}

impl EarlierState<'_> {
    /// Returns the unread messages above this pointer unless they may have changed.
    fn unchanged_count(&self, pointer: &ReadPointer) -> Option<&CountedChannel> {
        let counted = self.state.counted.get(&pointer.channel_id)?;
        let is_kept = counted.unread.oldest_id.is_none_or(|oldest| oldest >= self.kept_from);
        (counted.read_id == pointer.read_id && is_kept && !self.changes.contains(pointer)).then_some(counted)
    }

    /// Returns the mentions unless they may have changed, given that the counts of all `places` have not.
    fn unchanged_mentions(&self, places: usize) -> Option<Vec<Mention>> {
        let mentions = &self.state.mentions;
        let is_kept = self.state.counted.len() == places && mentions.iter().all(|row| row.message_id >= self.kept_from);
        is_kept.then(|| mentions.clone())
    }

    /// Returns the reactions unless they may have changed.
    fn unchanged_reactions(&self) -> Option<Vec<ReceivedReaction>> {
        let reactions = &self.state.reactions;
        let is_kept = !self.changes.has_others && reactions.iter().all(|row| row.message_id >= self.kept_from);
        is_kept.then(|| reactions.clone())
    }
}

impl Mailboxes {
    /// Returns the unread messages of the caller.
    pub(super) async fn read_unread(&self, caller: &AgentCaller) -> EngineResult<Arc<UnreadState>> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        let key = (scope.workspace_id(), agent);
        // Before anything is read: a state from during a recovery does not count after it.
        let epoch = self.core.store.known_epoch();
        let marks = self.core.store.read_marks(scope, agent).await?;
        let kept_from = find_first_kept(self.core.now());
        let before = self.unread.0.get(&key).filter(|state| state.precedes(epoch, &marks, &caller.name));
        if let Some(state) = before.as_ref().filter(|state| state.is_current(&marks, kept_from)) {
            return Ok(Arc::clone(state));
        }
        let changes = match &before {
            Some(before) => self.read_changes(scope, before.marks.event_head, marks.event_head).await?,
            None => None,
        };
        let earlier = before.as_deref().zip(changes.as_ref());
        let earlier = earlier.map(|(state, changes)| EarlierState { state, changes, kept_from });
        let state = Arc::new(self.refresh_unread(caller, (epoch, marks), earlier).await?);
        // May replace a newer state of a concurrent request. Its marks are older as well, so the next read finds out.
        self.unread.0.insert(key, Arc::clone(&state));
        Ok(state)
    }

    /// Reads the unread messages of the caller, as far as they may have changed.
    async fn refresh_unread(
        &self,
        caller: &AgentCaller,
        (epoch, marks): (Option<i64>, ReadMarks),
        earlier: Option<EarlierState<'_>>,
    ) -> EngineResult<UnreadState> {
        let (store, scope, agent) = (&self.core.store, caller.scope, caller.agent_id);
        let pointers = store.read_pointers(scope, agent).await?;
        let (mut counted, mut changed) = (HashMap::new(), Vec::new());
        for pointer in &pointers {
            match earlier.as_ref().and_then(|earlier| earlier.unchanged_count(pointer)) {
                Some(same) => drop(counted.insert(pointer.channel_id, same.clone())),
                None => changed.push((pointer.channel_id, pointer.read_id)),
            }
        }
        let rows = store.count_unread(scope, agent, &changed).await?;
        counted.extend(rows.into_iter().map(|row| (row.channel_id, row)));
        // A channel that is counted again may have new mentions.
        let unchanged = earlier.as_ref().filter(|_| changed.is_empty());
        let mentions = match unchanged.and_then(|earlier| earlier.unchanged_mentions(pointers.len())) {
            Some(mentions) => mentions,
            None => {
                let pointers: Vec<_> = pointers.iter().map(|pointer| (pointer.channel_id, pointer.read_id)).collect();
                store.unread_mentions(scope, (agent, &caller.name), &pointers, MAX_SHOWN).await?
            }
        };
        let reactions = match earlier.as_ref().and_then(EarlierState::unchanged_reactions) {
            Some(reactions) => reactions,
            None => store.received_reactions(scope, agent, MAX_SHOWN).await?,
        };
        let unread = find_unread(pointers, &counted);
        let shown = mentions.iter().map(|row| row.message_id).chain(reactions.iter().map(|row| row.message_id));
        let oldest_id = unread.iter().filter_map(|place| place.unread.oldest_id).chain(shown).min();
        let name = Arc::clone(&caller.name);
        Ok(UnreadState { epoch, marks, name, counted, unread, mentions, reactions, oldest_id })
    }

    /// Returns the changes between two heads of the event log; `None` if they are unknown.
    async fn read_changes(
        &self,
        scope: WorkspaceScope,
        before: EventSeq,
        now: EventSeq,
    ) -> EngineResult<Option<Changes>> {
        let count = now - before;
        match count {
            0 => Ok(Some(Changes::default())),
            1..=MAX_EVENTS => {
                let records = self.core.store.events_since(scope, before - 1, count).await?;
                Ok(Changes::collect(records, before, now))
            }
            // Too many to search, or the head is lower than before: another state of the database.
            _ => Ok(None),
        }
    }
}

/// Returns the id from which on retention removes no message, not even within the next day.
fn find_first_kept(now: DateTime<Utc>) -> MessageId {
    let since = now - Days::new(u64::from(Retention::LEAST_DAYS) - 1);
    MessageId::new(snowflake::first_id_at(since.timestamp_millis()))
}

/// Returns the channels and conversations with unread messages, those with the newest ones first.
fn find_unread(pointers: Vec<ReadPointer>, counted: &HashMap<ChannelId, CountedChannel>) -> Vec<UnreadChannel> {
    let mut places: Vec<UnreadChannel> = pointers
        .into_iter()
        .filter_map(|ReadPointer { channel_id, name, conversation_id, .. }| {
            let unread = counted.get(&channel_id).map(|counted| &counted.unread).filter(|unread| unread.count > 0)?;
            Some(UnreadChannel { name, conversation_id, unread: unread.clone(), newest_text: String::new() })
        })
        .collect();
    places.sort_unstable_by_key(|place| Reverse(place.unread.newest_id));
    places
}

#[cfg(test)]
mod tests {
    use relay_domain::{ConversationId, events::Event, mailboxes::inbox::Unread};
    use serde_json::json;

    use super::*;

    fn pointer(channel: i64) -> ReadPointer {
        let (channel_id, read_id) = (ChannelId::new(channel), MessageId::new(0));
        ReadPointer { channel_id, name: "room".to_owned(), conversation_id: None, read_id }
    }

    fn record(first_seq: EventSeq, events: Vec<Event>) -> RecordedEvents {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        RecordedEvents { scope, first_seq, created_at: DateTime::UNIX_EPOCH, events, watched: false }
    }

    #[test]
    fn events_name_the_changes_if_none_is_missing() {
        let posted =
            || Event { body: EventBody::Message(MessageId::new(5)), ..Event::new("message.created", json!({})) };
        let records = |last| {
            vec![
                record(4, vec![posted().in_channel(ChannelId::new(1), "room"), posted()]),
                record(6, vec![posted().in_conversation(Some("9".to_owned())), last]),
            ]
        };
        for (first, head, is_complete) in [(4, 8, true), (5, 8, true), (3, 8, false), (4, 9, false), (4, 6, true)] {
            assert_eq!(Changes::collect(records(posted()), first, head).is_some(), is_complete, "{first} {head}");
        }
        assert!(Changes::collect(Vec::new(), 4, 5).is_none());
        let changes = Changes::collect(records(posted()), 4, 8).expect("complete");
        let conversation = |id| ReadPointer { conversation_id: Some(ConversationId::new(id)), ..pointer(3) };
        assert!(changes.contains(&pointer(1)) && changes.contains(&conversation("9")));
        assert!(!changes.contains(&pointer(2)) && !changes.contains(&conversation("8")) && !changes.has_others);
        let reacted = Changes::collect(records(Event::new("message.reacted", json!({}))), 4, 8).expect("complete");
        assert!(reacted.has_others);
    }

    fn marks(event_head: EventSeq) -> ReadMarks {
        let (channels, read_ids) = (vec![ChannelId::new(1)], vec![MessageId::new(0)]);
        ReadMarks { server_started_at: DateTime::UNIX_EPOCH, event_head, ack_floor: 3, channels, read_ids }
    }

    /// State of epoch 5 and agent `ada` whose channel 1 has this unread message, which mentions the agent.
    fn state(message: i64) -> UnreadState {
        let (channel_id, message_id) = (ChannelId::new(1), MessageId::new(message));
        let unread = Unread {
            count: 1,
            oldest_id: Some(message_id),
            newest_id: Some(message_id),
            newest_from: None,
            newest_bytes: None,
            newest_at: None,
        };
        let mention = Mention {
            message_id,
            channel_name: "room".to_owned(),
            agent_name: "bob".to_owned(),
            text: String::new(),
            text_bytes: 2,
            created_at: DateTime::UNIX_EPOCH,
        };
        UnreadState {
            epoch: Some(5),
            marks: marks(4),
            name: "ada".into(),
            counted: HashMap::from([(channel_id, CountedChannel { channel_id, read_id: MessageId::new(0), unread })]),
            unread: Vec::new(),
            mentions: vec![mention],
            reactions: Vec::new(),
            oldest_id: Some(message_id),
        }
    }

    #[test]
    fn a_state_belongs_to_one_epoch_one_server_and_one_name() {
        let promoted = ReadMarks { server_started_at: DateTime::UNIX_EPOCH + Duration::from_micros(1), ..marks(4) };
        let cases = [
            (Some(5), marks(4), "ada", true),
            (Some(5), marks(9), "ada", true),
            (Some(6), marks(4), "ada", false),
            (None, marks(4), "ada", false),
            (Some(5), promoted, "ada", false),
            (Some(5), marks(4), "eve", false),
        ];
        for (epoch, now, name, precedes) in cases {
            assert_eq!(state(7).precedes(epoch, &now, name), precedes, "{epoch:?} {now:?} {name}");
        }
    }

    #[test]
    fn a_state_is_current_while_its_marks_are_the_same_and_its_messages_are_kept() {
        let acked = ReadMarks { ack_floor: 4, ..marks(4) };
        let joined = ReadMarks { channels: vec![ChannelId::new(1), ChannelId::new(2)], ..marks(4) };
        let read = ReadMarks { read_ids: vec![MessageId::new(7)], ..marks(4) };
        let cases = [
            (marks(4), 7, true),
            (marks(4), 8, false),
            (marks(5), 7, false),
            (acked, 7, false),
            (joined, 7, false),
            (read, 7, false),
        ];
        for (now, kept_from, is_current) in cases {
            assert_eq!(state(7).is_current(&now, MessageId::new(kept_from)), is_current, "{now:?} {kept_from}");
        }
        let crowded = ReadMarks { channels: vec![ChannelId::new(1); 2001], ..marks(4) };
        let state = UnreadState { marks: crowded.clone(), ..state(7) };
        assert!(!state.is_current(&crowded, MessageId::new(7)), "memberships that are not among the marks");
    }

    #[test]
    fn counts_and_mentions_are_unchanged_unless_an_event_a_read_or_retention_concerns_them() {
        let state = state(7);
        let (none, posted) =
            (Changes::default(), Changes { channels: [ChannelId::new(1)].into(), ..Changes::default() });
        let since = |changes, kept_from| EarlierState { state: &state, changes, kept_from: MessageId::new(kept_from) };
        let read = ReadPointer { read_id: MessageId::new(7), ..pointer(1) };
        assert!(since(&none, 7).unchanged_count(&pointer(1)).is_some());
        assert!(since(&none, 8).unchanged_count(&pointer(1)).is_none(), "retention");
        assert!(since(&none, 7).unchanged_count(&read).is_none(), "a read");
        assert!(since(&none, 7).unchanged_count(&pointer(2)).is_none(), "a channel that was joined since");
        assert!(since(&posted, 7).unchanged_count(&pointer(1)).is_none(), "an event");

        assert!(since(&none, 7).unchanged_mentions(1).is_some());
        assert!(since(&none, 8).unchanged_mentions(1).is_none(), "retention");
        assert!(since(&none, 7).unchanged_mentions(0).is_none(), "a channel that was left since");
    }
}
