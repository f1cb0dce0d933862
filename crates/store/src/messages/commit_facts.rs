//! The first statement of a batch: it writes the outbox row and reads the [`BatchFacts`] that decide which sends are
//! still current. Called by the batch commit.

use std::collections::{HashMap, HashSet};

use const_format::concatcp;
use relay_domain::{AgentId, ChannelId, GatewayId, MessageId, NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use sqlx::{FromRow, Row, postgres::PgRow, types::Json};

use crate::{
    StoreError, StoreResult,
    connections::DatabaseSession,
    decode::decode_rows,
    messages::batch::{Batch, NewSend, SendOutcome, sort_and_dedup},
};

/// Gateways of the providers by which the agent `a` is served, for [`connected_gateways`]. Both forms read by key: a
/// condition on `gateway_id` would let the planner choose the index of all connected providers.
macro_rules! gateways_of_agent {
    () => {
        "CASE WHEN a.provider IS NULL
              THEN ARRAY(SELECT p.gateway_id FROM providers p
                          WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id)
              ELSE ARRAY(SELECT p.gateway_id FROM providers p
                          WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id AND p.provider = a.provider)
          END"
    };
}
pub(crate) use gateways_of_agent;

/// Returns the gateways with sockets, each once, as [`crate::messages::batch::WrittenDelivery`] names them.
pub(crate) fn connected_gateways(of_providers: Vec<Option<GatewayId>>) -> Vec<GatewayId> {
    let mut gateways: Vec<GatewayId> = of_providers.into_iter().flatten().collect();
    sort_and_dedup(&mut gateways);
    gateways
}

/// The rows that a batch depends on, as its transaction read them.
#[derive(Default)]
pub(crate) struct BatchFacts {
    agents: HashMap<(WorkspaceId, AgentId), AgentFacts>,
    channels: HashMap<(WorkspaceId, ChannelId), i64>,
    workspaces: HashMap<WorkspaceId, WorkspaceFacts>,
    /// Agents with open fan-outs, and the oldest of these.
    open_fanouts: HashMap<(WorkspaceId, AgentId), MessageId>,
}

#[derive(Clone, Copy)]
struct WorkspaceFacts {
    ttl_seconds: i32,
    depth: i32,
    watched: bool,
}

pub(crate) struct AgentFacts {
    generation: i64,
    pub(crate) node_id: NodeId,
    pub(crate) provider: Option<ProviderName>,
    pub(crate) gateways: Vec<GatewayId>,
}

impl BatchFacts {
    /// True if the facts that the request was resolved with still hold.
    pub(crate) fn is_current(&self, send: &NewSend) -> bool {
        let workspace = send.scope.workspace_id();
        let agent = |id| self.agents.get(&(workspace, id));
        self.workspaces.contains_key(&workspace)
            && self.channels.get(&(workspace, send.message.channel_id)) == Some(&send.members_version)
            && (send.hidden_sender
                || agent(send.message.agent_id).is_some_and(|sender| {
                    send.token_generation.is_none_or(|generation| generation == sender.generation)
                }))
            // The record of a fan-out keeps those that exist.
            && (send.is_fanout() || send.recipients.iter().all(|recipient| agent(recipient.agent_id).is_some()))
    }

    /// Returns for each send of a batch why it may not be written: its facts do not hold, an open fan-out of its author
    /// precedes it, or the same is true of a send before it in its sequence. Otherwise a send that is submitted again
    /// would follow those that it precedes.
    pub(crate) fn find_refused(&self, sends: &[NewSend]) -> Vec<Option<SendOutcome>> {
        let mut broken = HashSet::new();
        let refusal = |send: &NewSend| {
            let follows_a_break = send.sequence.is_some_and(|sequence| broken.contains(&sequence));
            let refused = if !self.is_current(send) {
                SendOutcome::Stale
            } else if follows_a_break {
                SendOutcome::Preceded
            } else if self.follows_fanout(send) {
                SendOutcome::SenderBusy
            } else {
                return None;
            };
            broken.extend(send.sequence);
            Some(refused)
        };
        sends.iter().map(refusal).collect()
    }

    /// Returns whether an open fan-out of the same author precedes the send.
    fn follows_fanout(&self, send: &NewSend) -> bool {
        let author = (send.scope.workspace_id(), send.message.agent_id);
        self.open_fanouts.get(&author).is_some_and(|oldest| *oldest < send.arrived)
    }

    pub(crate) fn agent(&self, scope: WorkspaceScope, agent: AgentId) -> Option<&AgentFacts> {
        self.agents.get(&(scope.workspace_id(), agent))
    }

    /// Delivery TTL in seconds and mailbox depth; `None` if the workspace has ended.
    pub(crate) fn workspace(&self, scope: WorkspaceScope) -> Option<(i32, i32)> {
        self.workspaces.get(&scope.workspace_id()).map(|facts| (facts.ttl_seconds, facts.depth))
    }

    /// True while the workspace's event log has readers. Events of single deliveries are recorded only then.
    pub(crate) fn is_watched(&self, scope: WorkspaceScope) -> bool {
        self.workspaces.get(&scope.workspace_id()).is_some_and(|facts| facts.watched)
    }
}

/// One row of [`OPEN`].
enum Fact {
    /// The outbox row was inserted.
    BatchOpened,
    Agent(AgentId, AgentFacts),
    Channel(ChannelId, i64),
    Workspace(WorkspaceFacts),
    /// The oldest open fan-out of the agent.
    OpenFanout(AgentId, MessageId),
}

struct FactRow {
    workspace_id: WorkspaceId,
    fact: Fact,
}

impl FromRow<'_, PgRow> for FactRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let fact = match row.try_get("kind")? {
            "agent" => Fact::Agent(
                row.try_get("id")?,
                AgentFacts {
                    generation: row.try_get("version")?,
                    node_id: row.try_get("node_id")?,
                    provider: row.try_get("provider")?,
                    gateways: connected_gateways(row.try_get("gateways")?),
                },
            ),
            "channel" => Fact::Channel(row.try_get("id")?, row.try_get("version")?),
            "workspace" => Fact::Workspace(WorkspaceFacts {
                ttl_seconds: row.try_get("ttl")?,
                depth: row.try_get("depth")?,
                watched: row.try_get::<i64, _>("version")? == 1,
            }),
            "fanout" => Fact::OpenFanout(row.try_get("id")?, row.try_get("version")?),
            "batch" => Fact::BatchOpened,
            other => {
                let source = format!("{other} is no kind of fact").into();
                return Err(sqlx::Error::ColumnDecode { index: "kind".to_owned(), source });
            }
        };
        Ok(Self { workspace_id: row.try_get("workspace_id")?, fact })
    }
}

// One round trip for the insert and all facts. On a resubmitted batch the insert waits until the first transaction
// ends.
// Open fan-outs are read for all agents, because one list holds senders and recipients. Only the senders' fan-outs
// matter.
const OPEN: &str = concatcp!(
    "
WITH opened AS (
    INSERT INTO outbox (batch_id, gateway_id, sources, traceparent)
    SELECT $6::bigint, $7::bigint, $8::jsonb, $9::text FROM relay_require_epoch($10)
    ON CONFLICT (batch_id) DO NOTHING RETURNING batch_id
)
SELECT 'batch' AS kind, 0::bigint AS workspace_id, batch_id AS id, 0::bigint AS version,
       NULL AS node_id, NULL AS provider, NULL::bigint[] AS gateways, 0 AS ttl, 0 AS depth
  FROM opened
UNION ALL
SELECT 'agent', a.workspace_id, a.agent_id, a.token_generation, a.node_id, a.provider, ",
    gateways_of_agent!(),
    ", 0, 0
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
  JOIN agents a USING (workspace_id, agent_id)
 WHERE a.deleted_at IS NULL
UNION ALL
SELECT 'fanout', f.workspace_id, f.sender_id, min(f.message_id), NULL, NULL, NULL, 0, 0
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, sender_id)
  JOIN fanouts f USING (workspace_id, sender_id)
 GROUP BY f.workspace_id, f.sender_id
UNION ALL
SELECT 'channel', c.workspace_id, c.channel_id, c.members_version, NULL, NULL, NULL, 0, 0
  FROM unnest($3::bigint[], $4::bigint[]) AS k (workspace_id, channel_id)
  JOIN channels c USING (workspace_id, channel_id)
 WHERE c.archived_at IS NULL
UNION ALL
SELECT 'workspace', w.workspace_id, 0, (coalesce(h.watched_until, '-infinity') > relay_now())::int, NULL, NULL,
       NULL, w.delivery_ttl_seconds, w.mailbox_depth
  FROM unnest($5::bigint[]) AS k (workspace_id)
  JOIN workspaces w USING (workspace_id)
  LEFT JOIN event_heads h USING (workspace_id)
 WHERE w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > relay_now())"
);

/// Writes the batch's outbox row, whose unique id identifies a resubmitted batch, and reads the rows that the batch
/// depends on. They are not locked: a later change is not this batch's concern, and `members_version` and the token
/// generation detect an earlier one. `None`: this batch was committed before.
pub(crate) async fn open_batch(tx: &mut DatabaseSession, batch: &Batch) -> StoreResult<Option<BatchFacts>> {
    let sends = &batch.sends;
    let (mut agents, mut channels) = (Vec::new(), Vec::new());
    for send in sends {
        let workspace = send.scope.workspace_id();
        channels.push((workspace, send.message.channel_id));
        agents.push((workspace, send.message.agent_id));
        // The recipients of a fan-out are checked by its record and by its chunks.
        if !send.is_fanout() {
            agents.extend(send.recipients.iter().map(|recipient| (workspace, recipient.agent_id)));
        }
    }
    sort_and_dedup(&mut agents);
    sort_and_dedup(&mut channels);
    // `dedup` suffices: the channels are sorted by workspace.
    let mut workspaces: Vec<WorkspaceId> = channels.iter().map(|(workspace, _)| *workspace).collect();
    workspaces.dedup();
    let (agent_workspaces, agent_ids): (Vec<WorkspaceId>, Vec<AgentId>) = agents.into_iter().unzip();
    let (channel_workspaces, channel_ids): (Vec<WorkspaceId>, Vec<ChannelId>) = channels.into_iter().unzip();
    let rows = sqlx::query(OPEN)
        .bind(agent_workspaces)
        .bind(agent_ids)
        .bind(channel_workspaces)
        .bind(channel_ids)
        .bind(workspaces)
        .bind(batch.id)
        .bind(batch.gateway_id)
        .bind(Json(batch.sources()))
        .bind(&batch.traceparent)
        .bind(batch.epoch)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("opening a batch"))?;
    let mut facts = BatchFacts::default();
    let mut is_new = false;
    for FactRow { workspace_id, fact } in decode_rows("agents", &rows)? {
        match fact {
            Fact::BatchOpened => is_new = true,
            Fact::Agent(id, agent) => {
                facts.agents.insert((workspace_id, id), agent);
            }
            Fact::Channel(id, members_version) => {
                facts.channels.insert((workspace_id, id), members_version);
            }
            Fact::Workspace(workspace) => {
                facts.workspaces.insert(workspace_id, workspace);
            }
            Fact::OpenFanout(agent, oldest) => {
                facts.open_fanouts.insert((workspace_id, agent), oldest);
            }
        }
    }
    Ok(is_new.then_some(facts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::batch::tests::send;

    fn facts(send: &NewSend) -> BatchFacts {
        let workspace = send.scope.workspace_id();
        let agent =
            |generation| AgentFacts { generation, node_id: NodeId::new("n1"), provider: None, gateways: Vec::new() };
        let agents = [(1, agent(1)), (2, agent(5)), (3, agent(5))];
        BatchFacts {
            agents: agents.map(|(id, facts)| ((workspace, AgentId::new(id)), facts)).into(),
            channels: [((workspace, send.message.channel_id), send.members_version)].into(),
            workspaces: [(workspace, WorkspaceFacts { ttl_seconds: 60, depth: 10, watched: false })].into(),
            open_fanouts: HashMap::new(),
        }
    }

    #[test]
    fn a_send_is_stale_once_a_row_it_relied_on_has_changed() {
        let sent = send();
        let workspace = sent.scope.workspace_id();
        assert!(facts(&sent).is_current(&sent));
        let changes: [(&str, fn(&mut BatchFacts, WorkspaceId)); 5] = [
            ("the workspace ended", |facts, _| facts.workspaces.clear()),
            ("members changed", |facts, _| facts.channels.values_mut().for_each(|version| *version += 1)),
            ("the channel was archived", |facts, _| facts.channels.clear()),
            ("a recipient was deleted", |facts, workspace| {
                facts.agents.remove(&(workspace, AgentId::new(3)));
            }),
            ("the sender's token was rotated", |facts, workspace| {
                if let Some(sender) = facts.agents.get_mut(&(workspace, AgentId::new(1))) {
                    sender.generation += 1;
                }
            }),
        ];
        for (change, apply) in changes {
            let mut facts = facts(&sent);
            apply(&mut facts, workspace);
            assert!(!facts.is_current(&sent), "{change}");
        }
    }

    #[test]
    fn an_outdated_send_holds_back_those_after_it_in_its_sequence() {
        let current = send();
        let of = |sequence, members_version| NewSend { sequence, members_version, ..current.clone() };
        let outdated = current.members_version + 1;
        let version = current.members_version;
        let sends = [
            of(Some(1), version),
            of(Some(2), outdated),
            of(Some(1), outdated),
            of(None, outdated),
            of(None, version),
            of(Some(1), version),
            of(Some(2), version),
            of(Some(3), version),
        ];
        let facts = facts(&current);
        let open = |facts: &BatchFacts| facts.find_refused(&sends).iter().map(Option::is_none).collect::<Vec<_>>();
        assert_eq!(open(&facts), [true, false, false, false, true, false, false, true]);

        let mut facts = facts;
        let author = (current.scope.workspace_id(), current.message.agent_id);
        facts.open_fanouts.insert(author, current.arrived);
        assert_eq!(open(&facts), [true, false, false, false, true, false, false, true], "a fan-out that came later");
        facts.open_fanouts.insert(author, MessageId::new(current.arrived.get() - 1));
        let refused = facts.find_refused(&sends);
        assert!(matches!(refused[0], Some(SendOutcome::SenderBusy)), "{refused:?}");
        assert!(
            matches!(refused[5], Some(SendOutcome::Preceded)),
            "a send of the same sequence waits for it: {refused:?}"
        );
    }

    #[test]
    fn a_node_posts_for_an_agent_whatever_its_token_and_a_webhook_without_one() {
        let sent = send();
        let workspace = sent.scope.workspace_id();
        let mut facts = facts(&sent);
        let by_node = NewSend { token_generation: None, ..sent.clone() };
        facts.agents.entry((workspace, AgentId::new(1))).and_modify(|sender| sender.generation = 9);
        assert!(facts.is_current(&by_node));
        facts.agents.remove(&(workspace, AgentId::new(1)));
        assert!(!facts.is_current(&by_node), "it was deleted");
        assert!(facts.is_current(&NewSend { hidden_sender: true, ..by_node }));
    }
}
