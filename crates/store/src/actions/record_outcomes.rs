//! Recording of the outcomes that handlers report: one statement, which is its own transaction, for rows, deliveries
//! and events. Called by the engine's outcome queue.
//!
//! There are two such statements. The smaller one, which is executed first, writes no deliveries. If an outcome is
//! durable, it locks and writes nothing, so that it has no commit that waits for the disk, and the other one follows.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, GatewayId, InvocationId, NodeId, ProviderName, WorkspaceId,
    actions::Invocation,
    events::EventSeq,
    mailboxes::delivery::{Reason, SourceKind},
};
use sqlx::{FromRow, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        invocations::{COLUMNS, decode_invocations},
        outcomes::{InvocationOutcome, OutcomeBatch, OutcomeRecording, OutcomeSource, notifications, outcome_events},
        result_deliveries::{WrittenResult, delivered_results},
    },
    connections::Purpose,
    decode::decode_rows,
    events::{self, appended_events},
    messages::days::day_of,
};

const SUBMITTED: &str = "
WITH r AS (
    SELECT r.*
      FROM relay_require_epoch($15),
           unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bool[], $7::bigint[],
                  $8::text[], $9::text[], $10::bigint[], $11::bool[]) WITH ORDINALITY
           AS r (workspace_id, invocation_id, node_id, provider, epoch, by_provider, agent_id,
                 output, error, duration_ms, is_release_ended, ord)
)";

// Locks the rows in id order, unless an outcome is in `postponed`, which the caller defines. Then accepts one valid
// outcome of each invocation: the first that can be recorded, or else the first. A provider may answer an invocation
// that returned to `pending` when its connection broke, until another provider has it. The broker of a handling agent
// may report that the agent is unreachable. An outcome may precede the record of its frame, and names the node then.
// `greatest(0, …)` is needed because start and end come from the clocks of two processes.
//
// The parts of the whole statement run in the lock order of all writers: invocations, mailbox heads, event counters.
// `want` reads all of `done`, and `made` counts `delivered`.
const DONE: &str = concatcp!(
    ", locked AS MATERIALIZED (
    SELECT r.*, i.status, i.durable, i.handler_agent_id, i.node_id AS placed_node_id, i.provider AS placed_provider
      FROM r JOIN invocations i USING (workspace_id, invocation_id)
     WHERE i.completed_at IS NULL AND NOT EXISTS (SELECT FROM postponed)
     ORDER BY i.workspace_id, i.invocation_id, r.ord
       FOR UPDATE OF i
), valid AS (
    SELECT DISTINCT ON (l.workspace_id, l.invocation_id) l.*,
           NOT l.is_release_ended AND EXISTS (
               SELECT FROM agent_releases a
                WHERE a.workspace_id = l.workspace_id AND a.invocation_id = l.invocation_id) AS is_open_release
      FROM locked l
     WHERE CASE WHEN l.by_provider THEN
                EXISTS (SELECT FROM providers p
                         WHERE p.workspace_id = l.workspace_id AND p.node_id = l.node_id
                           AND p.provider = l.provider AND p.epoch = l.epoch)
                AND (l.placed_node_id = l.node_id AND l.placed_provider = l.provider
                     AND l.status IN ('dispatched', 'pending')
                     OR l.status = 'invoked' AND EXISTS (
                        SELECT FROM agents a
                         WHERE a.workspace_id = l.workspace_id AND a.agent_id = l.handler_agent_id
                           AND a.node_id = l.node_id AND (a.provider IS NULL OR a.provider = l.provider)))
           ELSE l.handler_agent_id IS NOT NULL AND (l.agent_id IS NULL OR l.handler_agent_id = l.agent_id)
           END
     ORDER BY l.workspace_id, l.invocation_id, is_open_release, l.ord
), done AS (
    UPDATE invocations i
       SET status = CASE WHEN v.error IS NULL THEN 'completed' ELSE 'failed' END,
           output = v.output::json, error = v.error, reserves = false, completed_at = $12,
           node_id = coalesce(i.node_id, v.node_id), provider = coalesce(i.provider, v.provider),
           dispatched_at = CASE WHEN v.node_id IS NULL THEN i.dispatched_at ELSE coalesce(i.dispatched_at, i.created_at) END,
           duration_ms = coalesce(v.duration_ms, greatest(0,
               (extract(epoch FROM $12 - coalesce(i.sent_at, i.dispatched_at, i.created_at)) * 1000)::bigint))
      FROM valid v
     WHERE i.workspace_id = v.workspace_id AND i.invocation_id = v.invocation_id AND i.completed_at IS NULL
       AND NOT v.is_open_release
    RETURNING v.ord, ",
    COLUMNS,
    ")"
);

/// The rows of the events are made from the invocations, as [`outcome_events`] makes the events themselves: the
/// statement need not know before what it ends.
const RECORDED: &str = concatcp!(
    r#", made AS MATERIALIZED (
    SELECT workspace_id, count(*) AS event_count, '[' || string_agg(
               format('{"t":"action.%1$s","a":%2$s,"d":{"invocation_id":"inv_%3$s","action_name":%4$s,'
                      '"status":"%1$s","output":%5$s,"error":%6$s}}',
                      status, coalesce(caller_id::text, 'null'), invocation_id, to_json(action_name),
                      coalesce(CASE WHEN json_typeof(output) = 'object' THEN output::text
                                    WHEN json_typeof(output) <> 'null' THEN '{"value":' || output::text || '}' END,
                               'null'),
                      coalesce(to_json(error)::text, 'null')),
               ',' ORDER BY invocation_id) || ']' AS events
      FROM done WHERE (SELECT count(*) FROM delivered) >= 0
     GROUP BY workspace_id
), "#,
    appended_events!("$12", "$13"),
    "
SELECT ord, coalesce(v.is_open_release, false) AS is_open_release, postponed.ord IS NOT NULL AS is_postponed, ",
    COLUMNS,
    ", d.node_id AS mailbox_node_id, e.first_seq, e.watched,
       (SELECT CASE WHEN min(p.gateway_id) = max(p.gateway_id) THEN min(p.gateway_id) END
          FROM agents a JOIN providers p USING (workspace_id, node_id)
         WHERE a.workspace_id = i.workspace_id AND a.agent_id = i.caller_id AND p.gateway_id IS NOT NULL
           AND (a.provider IS NULL OR a.provider = p.provider)) AS caller_gateway_id
  FROM valid v
  FULL JOIN postponed USING (ord)
  LEFT JOIN done i USING (ord)
  LEFT JOIN (SELECT workspace_id, next_seq - event_count AS first_seq, watched
               FROM made JOIN raised USING (workspace_id)) AS e
       ON e.workspace_id = i.workspace_id
  LEFT JOIN delivered d ON d.workspace_id = i.workspace_id AND d.source_id = i.invocation_id
 ORDER BY v.workspace_id, v.invocation_id"
);

/// Records outcomes, durable or not.
const RECORD: &str = concatcp!(
    SUBMITTED,
    ", postponed AS (SELECT 0::bigint AS ord WHERE false)",
    DONE,
    ", want AS MATERIALIZED (
    SELECT workspace_id, caller_id AS agent_id, invocation_id AS source_id,
           row_number() OVER (PARTITION BY workspace_id, caller_id ORDER BY invocation_id) AS rank
      FROM done WHERE durable AND caller_id IS NOT NULL
), ",
    delivered_results!(day: "$13", at: "$12", kind: "$16", reason: "$14"),
    RECORDED
);

/// Records outcomes of which none is durable, or nothing. Preparing to write deliveries takes Postgres longer than all
/// the rest, even if there are none. It decides without a lock, since `durable` never changes.
const RECORD_WITHOUT_DELIVERIES: &str = concatcp!(
    SUBMITTED,
    ", postponed AS MATERIALIZED (
    SELECT r.ord FROM r JOIN invocations i USING (workspace_id, invocation_id)
     WHERE i.durable AND i.completed_at IS NULL
)",
    DONE,
    ", delivered AS (SELECT 0::bigint AS workspace_id, 0::bigint AS source_id, ''::text AS node_id WHERE false)",
    RECORDED
);

impl Store {
    /// Records outcomes. A refused outcome changes nothing. Recording the same outcomes again is refused, so that an
    /// unknown commit outcome needs no resolution.
    pub async fn record_outcomes(&self, results: &[InvocationOutcome], at: DateTime<Utc>) -> StoreResult<OutcomeBatch> {
        let columns = OutcomeColumns::collect(results);
        let mut rows = self.record_columns(RECORD_WITHOUT_DELIVERIES, &columns, at).await?;
        if rows.iter().any(|(row, _)| row.is_postponed) {
            rows = self.record_columns(RECORD, &columns, at).await?;
        }
        // The statement returns no row for a refused outcome.
        let mut outcomes = vec![OutcomeRecording::Refused; results.len()];
        let mut recorded = Vec::with_capacity(rows.len());
        for (facts, row) in rows {
            if facts.is_written() {
                recorded.push((facts, row));
            } else if let (true, Some((nth, outcome))) = (facts.is_open_release, outcome_at(results, facts.ord)) {
                outcomes[nth] = OutcomeRecording::OpenRelease(Box::new(outcome.clone()));
            }
        }
        let (recorded, rows): (Vec<OutcomeRow>, Vec<PgRow>) = recorded.into_iter().unzip();
        let done = decode_invocations(&rows)?;
        let (mut written, mut numbered, mut gateways) = (Vec::new(), Vec::new(), HashMap::new());
        for (invocation, row) in done.iter().zip(recorded) {
            if let Some((nth, _)) = outcome_at(results, row.ord) {
                outcomes[nth] = OutcomeRecording::Recorded(Box::new(invocation.clone()));
            }
            let workspace = invocation.scope.workspace_id();
            numbered.extend(row.first_seq.zip(row.watched).map(|(seq, watched)| (workspace, seq, watched)));
            gateways.extend(row.caller_gateway_id.map(|gateway| (invocation.invocation_id, gateway)));
            written.extend(row.delivery_of(invocation));
        }
        let recorded = events::number_events(at, events::group_by_workspace(outcome_events(&done)), &numbered);
        let mut batch = notifications(&done, written);
        for notice in &mut batch.notices {
            notice.gateway_id = gateways.get(&notice.invocation).copied();
        }
        Ok(OutcomeBatch { outcomes, recorded, ..batch })
    }

    async fn record_columns(
        &self,
        statement: &'static str,
        columns: &OutcomeColumns<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<Vec<(OutcomeRow, PgRow)>> {
        let doing = "recording outcomes";
        let epoch = self.epoch(doing)?;
        let query = sqlx::query(statement)
            .bind(&columns.workspace)
            .bind(&columns.invocation)
            .bind(&columns.node)
            .bind(&columns.provider)
            .bind(&columns.epoch)
            .bind(&columns.by_provider)
            .bind(&columns.agent)
            .bind(&columns.output)
            .bind(&columns.error)
            .bind(&columns.duration_ms)
            .bind(&columns.is_release_ended)
            .bind(at)
            .bind(day_of(at))
            .bind(Reason::ActionResult)
            .bind(epoch)
            .bind(SourceKind::ActionResult);
        let rows = self.pool.fetch_all_for(Purpose::Outcomes, query).await.map_err(StoreError::from_sqlx(doing));
        // Without a BEGIN, which would note it, another epoch has to be noted here.
        let rows = self.note_epoch(epoch, rows)?;
        Ok(decode_rows("invocations", &rows)?.into_iter().zip(rows).collect())
    }
}

/// Returns the outcome with this place, which counts from 1, and its index.
fn outcome_at(results: &[InvocationOutcome], ord: i64) -> Option<(usize, &InvocationOutcome)> {
    let nth = usize::try_from(ord - 1).ok()?;
    Some((nth, results.get(nth)?))
}

/// Columns of a valid or postponed outcome beside those of the invocation, which are null unless it was written.
#[derive(FromRow)]
struct OutcomeRow {
    /// Place among the outcomes, from 1.
    ord: i64,
    is_open_release: bool,
    /// [`RECORD_WITHOUT_DELIVERIES`] wrote nothing, because this one is durable.
    is_postponed: bool,
    /// Node of the caller, if its mailbox received the outcome.
    mailbox_node_id: Option<NodeId>,
    /// Seq of the first event of the workspace.
    first_seq: Option<EventSeq>,
    watched: Option<bool>,
    /// The only gateway that serves the caller.
    caller_gateway_id: Option<GatewayId>,
}

impl OutcomeRow {
    fn is_written(&self) -> bool {
        self.first_seq.is_some()
    }

    fn delivery_of(self, row: &Invocation) -> Option<WrittenResult> {
        let (node_id, agent_id) = (self.mailbox_node_id?, row.caller_id?);
        Some(WrittenResult { scope: row.scope, agent_id, node_id, invocation_id: row.invocation_id })
    }
}

/// Parameters of [`RECORD`], one row per outcome.
#[derive(Default)]
struct OutcomeColumns<'a> {
    workspace: Vec<WorkspaceId>,
    invocation: Vec<InvocationId>,
    node: Vec<Option<&'a NodeId>>,
    provider: Vec<Option<&'a ProviderName>>,
    epoch: Vec<Option<i64>>,
    by_provider: Vec<bool>,
    agent: Vec<Option<AgentId>>,
    output: Vec<Option<String>>,
    error: Vec<Option<&'a str>>,
    duration_ms: Vec<Option<i64>>,
    is_release_ended: Vec<bool>,
}

impl<'a> OutcomeColumns<'a> {
    fn collect(results: &'a [InvocationOutcome]) -> Self {
        let mut columns = Self::default();
        for outcome in results {
            let (fence, agent, location) = match &outcome.source {
                OutcomeSource::Provider(fence) => (Some(fence), None, Some((&fence.node_id, &fence.provider))),
                OutcomeSource::Handler { agent, sent_to } => {
                    (None, *agent, sent_to.as_ref().map(|(node, provider)| (node, provider)))
                }
            };
            columns.workspace.push(outcome.scope.workspace_id());
            columns.invocation.push(outcome.invocation);
            columns.node.push(location.map(|(node, _)| node));
            columns.provider.push(location.map(|(_, provider)| provider));
            columns.epoch.push(fence.map(|fence| fence.epoch));
            columns.by_provider.push(fence.is_some());
            columns.agent.push(agent);
            columns.output.push(outcome.result.as_ref().ok().map(ToString::to_string));
            columns.error.push(outcome.result.as_ref().err().map(String::as_str));
            columns.duration_ms.push(outcome.duration_ms);
            columns.is_release_ended.push(outcome.is_release_ended);
        }
        columns
    }
}
