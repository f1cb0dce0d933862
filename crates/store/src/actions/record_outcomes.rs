//! Recording of the outcomes that handlers report: a read of their open invocations, then one statement, which is its
//! own transaction, for rows, deliveries and events. Called by the engine's outcome queue.

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, InvocationId, JsonText, NodeId, ProviderName, WorkspaceId,
    actions::{Invocation, InvocationStatus},
    events::EventSeq,
    mailboxes::delivery::{Reason, SourceKind},
};
use sqlx::{FromRow, Postgres, postgres::PgArguments, query::Query};

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        invocations::{COLUMNS, decode_invocations},
        outcomes::{
            InvocationOutcome, OutcomeBatch, OutcomeFacts, OutcomeRecording, OutcomeSource, notifications,
            outcome_events,
        },
        result_deliveries::{WrittenResult, delivered_results},
    },
    decode::decode_rows,
    events::{self, appended_events, stored_text},
    messages::days::day_of,
};

/// Constant facts of an open invocation, from which the event of its outcome is made.
#[derive(Debug, FromRow)]
struct OpenInvocation {
    /// Place among the outcomes, from 1.
    ord: i64,
    action_name: String,
    caller_id: Option<AgentId>,
    durable: bool,
    is_release: bool,
}

const OPEN: &str = "
SELECT r.ord, i.action_name, i.caller_id, i.durable,
       EXISTS (SELECT FROM agent_releases a
                WHERE a.workspace_id = i.workspace_id AND a.invocation_id = i.invocation_id) AS is_release
  FROM relay_require_epoch($3),
       unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS r (workspace_id, invocation_id, ord)
  JOIN invocations i USING (workspace_id, invocation_id)
 WHERE i.completed_at IS NULL";

// Locks the rows in id order, then accepts the first valid outcome of each invocation. A provider may answer an
// invocation that returned to `pending` when its connection broke, until another provider has it. The broker of a
// handling agent may report that the agent is unreachable. An outcome may precede the record of its frame, and names the
// node then. `greatest(0, …)` is needed because start and end come from the clocks of two processes.
//
// The parts of the whole statement run in the lock order of all writers: invocations, mailbox heads, event counters.
// `want` reads all of `done`, and `made` counts `delivered`.
const DONE: &str = concatcp!(
    "
WITH r AS (
    SELECT r.*
      FROM relay_require_epoch($16),
           unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bool[], $7::bigint[],
                  $8::text[], $9::text[], $10::bigint[], $11::text[]) WITH ORDINALITY
           AS r (workspace_id, invocation_id, node_id, provider, epoch, by_provider, agent_id,
                 output, error, duration_ms, event, ord)
), locked AS MATERIALIZED (
    SELECT r.ord, i.workspace_id, i.invocation_id
      FROM r JOIN invocations i USING (workspace_id, invocation_id)
     WHERE i.completed_at IS NULL
     ORDER BY i.workspace_id, i.invocation_id, r.ord
       FOR UPDATE OF i
), valid AS (
    SELECT DISTINCT ON (r.workspace_id, r.invocation_id) r.*
      FROM locked l
      JOIN r USING (ord)
      JOIN invocations i ON i.workspace_id = l.workspace_id AND i.invocation_id = l.invocation_id
     WHERE CASE WHEN r.by_provider THEN
                EXISTS (SELECT FROM providers p
                         WHERE p.workspace_id = r.workspace_id AND p.node_id = r.node_id
                           AND p.provider = r.provider AND p.epoch = r.epoch)
                AND (i.node_id = r.node_id AND i.provider = r.provider AND i.status IN ('dispatched', 'pending')
                     OR i.status = 'invoked' AND EXISTS (
                        SELECT FROM agents a
                         WHERE a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id
                           AND a.node_id = r.node_id AND (a.provider IS NULL OR a.provider = r.provider)))
           ELSE i.handler_agent_id IS NOT NULL AND (r.agent_id IS NULL OR i.handler_agent_id = r.agent_id)
           END
     ORDER BY r.workspace_id, r.invocation_id, r.ord
), done AS (
    UPDATE invocations i
       SET status = CASE WHEN v.error IS NULL THEN 'completed' ELSE 'failed' END,
           output = v.output::json, error = v.error, reserves = false, completed_at = $12,
           node_id = coalesce(i.node_id, v.node_id), provider = coalesce(i.provider, v.provider),
           dispatched_at = CASE WHEN v.by_provider THEN coalesce(i.dispatched_at, i.created_at) ELSE i.dispatched_at END,
           duration_ms = coalesce(v.duration_ms, greatest(0,
               (extract(epoch FROM $12 - coalesce(i.sent_at, i.dispatched_at, i.created_at)) * 1000)::bigint))
      FROM valid v
     WHERE i.workspace_id = v.workspace_id AND i.invocation_id = v.invocation_id AND i.completed_at IS NULL
    RETURNING v.ord, v.event, ",
    COLUMNS,
    ")"
);

const RECORDED: &str = concatcp!(
    ", made AS MATERIALIZED (
    SELECT workspace_id, count(*) AS n, '[' || string_agg(event, ',' ORDER BY invocation_id) || ']' AS events
      FROM done WHERE (SELECT count(*) FROM delivered) >= 0
     GROUP BY workspace_id
), ",
    appended_events!("$12", "$13"),
    "
SELECT i.ord, ",
    COLUMNS,
    ", d.node_id AS mailbox_node_id, e.first_seq, e.watched
  FROM done i
  JOIN (SELECT workspace_id, next_seq - n AS first_seq, watched FROM made JOIN raised USING (workspace_id)) AS e
       ON e.workspace_id = i.workspace_id
  LEFT JOIN delivered d ON d.workspace_id = i.workspace_id AND d.source_id = i.invocation_id
 ORDER BY i.workspace_id, i.invocation_id"
);

/// Records outcomes of which at least one is durable.
const RECORD: &str = concatcp!(
    DONE,
    ", want AS MATERIALIZED (
    SELECT workspace_id, caller_id AS agent_id, invocation_id AS source_id,
           row_number() OVER (PARTITION BY workspace_id, caller_id ORDER BY invocation_id) AS rank
      FROM done WHERE durable AND caller_id IS NOT NULL
), ",
    delivered_results!(day: "$13", at: "$12", kind: "$14", reason: "$15"),
    RECORDED
);

/// Records outcomes without deliveries. Preparing to write deliveries takes Postgres longer than all the rest, even if
/// there are none.
const RECORD_WITHOUT_DELIVERIES: &str = concatcp!(
    DONE,
    ", delivered AS (SELECT 0::bigint AS workspace_id, 0::bigint AS source_id, ''::text AS node_id WHERE false)",
    RECORDED
);

impl Store {
    /// Records outcomes. A refused outcome changes nothing. Recording the same outcomes again is refused, so that an
    /// unknown commit outcome needs no resolution.
    pub async fn record_outcomes(&self, results: &[InvocationOutcome], at: DateTime<Utc>) -> StoreResult<OutcomeBatch> {
        let doing = "recording outcomes";
        let epoch = self.epoch(doing)?;
        let mut outcomes = vec![OutcomeRecording::Refused; results.len()];
        let mut columns = OutcomeColumns::default();
        for open in self.note_epoch(epoch, self.read_open_invocations(results, epoch).await)? {
            let Some((nth, outcome)) = outcome_at(results, open.ord) else { continue };
            if open.is_release && !outcome.is_release_ended {
                outcomes[nth] = OutcomeRecording::OpenRelease(Box::new(outcome.clone()));
            } else {
                columns.push(nth, outcome, &open);
            }
        }
        if columns.places.is_empty() {
            return Ok(OutcomeBatch { outcomes, ..OutcomeBatch::default() });
        }
        let rows = columns.query(at, epoch).fetch_all(&self.pool).await.map_err(StoreError::from_sqlx(doing));
        let rows = self.note_epoch(epoch, rows)?;
        let done = decode_invocations(&rows)?;
        let (mut written, mut numbered) = (Vec::new(), Vec::new());
        for (invocation, row) in done.iter().zip(decode_rows::<RecordedRow>("invocations", &rows)?) {
            if let Some(nth) = position(row.ord).and_then(|position| columns.places.get(position)) {
                outcomes[*nth] = OutcomeRecording::Recorded(Box::new(invocation.clone()));
            }
            numbered.push((invocation.scope.workspace_id(), row.first_seq, row.watched));
            written.extend(row.delivery_of(invocation));
        }
        let recorded = events::number_events(at, events::group_by_workspace(outcome_events(&done)), &numbered);
        Ok(OutcomeBatch { outcomes, recorded, ..notifications(&done, written) })
    }

    async fn read_open_invocations(
        &self,
        results: &[InvocationOutcome],
        epoch: Option<i64>,
    ) -> StoreResult<Vec<OpenInvocation>> {
        sqlx::query_as(OPEN)
            .bind(results.iter().map(|outcome| outcome.scope.workspace_id()).collect::<Vec<_>>())
            .bind(results.iter().map(|outcome| outcome.invocation).collect::<Vec<_>>())
            .bind(epoch)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading answered invocations"))
    }
}

/// Converts an ordinal, which counts from 1, to an index.
fn position(ord: i64) -> Option<usize> {
    usize::try_from(ord - 1).ok()
}

fn outcome_at(results: &[InvocationOutcome], ord: i64) -> Option<(usize, &InvocationOutcome)> {
    let nth = position(ord)?;
    Some((nth, results.get(nth)?))
}

/// Columns of [`RECORD`] beside those of the invocation.
#[derive(FromRow)]
struct RecordedRow {
    /// Place in the columns, from 1.
    ord: i64,
    /// Node of the caller, if its mailbox received the outcome.
    mailbox_node_id: Option<NodeId>,
    /// Seq of the first event of the workspace.
    first_seq: EventSeq,
    watched: bool,
}

impl RecordedRow {
    fn delivery_of(self, row: &Invocation) -> Option<WrittenResult> {
        let (node_id, agent_id) = (self.mailbox_node_id?, row.caller_id?);
        Some(WrittenResult { scope: row.scope, agent_id, node_id, invocation_id: row.invocation_id })
    }
}

/// Parameters of [`RECORD`], one row per outcome.
#[derive(Default)]
struct OutcomeColumns {
    /// True if an outcome is durable.
    has_deliveries: bool,
    /// Index of the outcome among those of the call.
    places: Vec<usize>,
    workspace: Vec<WorkspaceId>,
    invocation: Vec<InvocationId>,
    node: Vec<Option<NodeId>>,
    provider: Vec<Option<ProviderName>>,
    epoch: Vec<Option<i64>>,
    by_provider: Vec<bool>,
    agent: Vec<Option<AgentId>>,
    output: Vec<Option<String>>,
    error: Vec<Option<String>>,
    duration_ms: Vec<Option<i64>>,
    event: Vec<String>,
}

impl OutcomeColumns {
    fn push(&mut self, nth: usize, outcome: &InvocationOutcome, open: &OpenInvocation) {
        let (fence, agent) = match &outcome.source {
            OutcomeSource::Provider(fence) => (Some(fence), None),
            OutcomeSource::Handler(agent) => (None, *agent),
        };
        let (output, error) = (outcome.result.as_ref().ok(), outcome.result.as_ref().err());
        let facts = OutcomeFacts {
            invocation_id: outcome.invocation,
            action_name: open.action_name.clone(),
            status: if error.is_none() { InvocationStatus::Completed } else { InvocationStatus::Failed },
            output: output.map(JsonText::encode),
            error: error.cloned(),
        };
        self.has_deliveries |= open.durable;
        self.places.push(nth);
        self.workspace.push(outcome.scope.workspace_id());
        self.invocation.push(outcome.invocation);
        self.node.push(fence.map(|fence| fence.node_id.clone()));
        self.provider.push(fence.map(|fence| fence.provider.clone()));
        self.epoch.push(fence.map(|fence| fence.epoch));
        self.by_provider.push(fence.is_some());
        self.agent.push(agent);
        self.output.push(output.map(ToString::to_string));
        self.error.push(error.cloned());
        self.duration_ms.push(outcome.duration_ms);
        self.event.push(stored_text(&facts.event(open.caller_id)));
    }

    fn query(&self, at: DateTime<Utc>, epoch: Option<i64>) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(if self.has_deliveries { RECORD } else { RECORD_WITHOUT_DELIVERIES })
            .bind(&self.workspace)
            .bind(&self.invocation)
            .bind(&self.node)
            .bind(&self.provider)
            .bind(&self.epoch)
            .bind(&self.by_provider)
            .bind(&self.agent)
            .bind(&self.output)
            .bind(&self.error)
            .bind(&self.duration_ms)
            .bind(&self.event)
            .bind(at)
            .bind(day_of(at))
            .bind(SourceKind::ActionResult)
            .bind(Reason::ActionResult)
            .bind(epoch)
    }
}
