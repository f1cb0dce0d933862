//! Actions that get, change or lose their handler: definition, take-over from one that is not live, and deletion. The
//! latter two end the open invocations of the former handler. Called by the engine's action use cases.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    ActionId, AgentId, NodeId, ProviderName, WorkspaceScope,
    actions::{self, TAKE_OVER_AFTER},
    events::kind,
};
use relay_wire::{events::recorded_data::ActionTakenOver, field::ToValue as _};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        invocations::{COLUMNS_WITHOUT_INPUT, decode_invocations},
        outcomes::{OutcomeBatch, deliver_outcomes},
    },
    codes::WS,
    connections::DatabaseSession,
    decode::decode_row,
    events::{self, Event, RecordedEvents},
    nodes::capabilities,
};

/// Definition of a new action, or replacement of the definition by the same handler.
#[derive(Debug)]
pub struct NewAction<'a> {
    /// Id to use if the action is new.
    pub action_id: ActionId,
    pub name: &'a str,
    pub description: &'a str,
    /// Handling agent; exactly one of this and `handler_node` is set.
    pub handler_agent: Option<AgentId>,
    pub handler_node: Option<&'a NodeId>,
    pub input_schema: &'a Value,
    pub output_schema: &'a Value,
    pub available_to: Option<&'a [String]>,
    /// Maximum number of actions in the workspace.
    pub limit: i64,
    /// Event that is recorded in the same transaction.
    pub event: Event,
    pub at: DateTime<Utc>,
}

/// Result of [`Store::define_action`].
#[derive(Debug)]
pub enum DefineOutcome {
    Stored {
        /// `true` if the action did not exist before.
        new: bool,
        recorded: RecordedEvents,
    },
    /// The action has the new handler now.
    TakenOver {
        recorded: RecordedEvents,
        /// Open invocations of the former handler.
        failed: OutcomeBatch,
    },
    /// Another handler owns the name, and is live.
    NameTaken,
    /// The workspace has reached the limit.
    TooMany,
}

/// Handler of an action, as its open invocations refer to it.
#[derive(Debug, sqlx::FromRow)]
struct ActionHandler {
    name: String,
    handler_agent_id: Option<AgentId>,
    handler_node_id: Option<NodeId>,
    provider: Option<ProviderName>,
}

/// Handler of an action before another one took it over, and the names of both.
#[derive(sqlx::FromRow)]
struct FormerHandler {
    #[sqlx(flatten)]
    handler: ActionHandler,
    agent: Option<String>,
    node: Option<String>,
    new_agent: Option<String>,
    new_node: Option<String>,
}

// An agent is live if it was seen recently, directly or through its provider; a node if one of the providers that may
// handle the action was. Endpoints and pollers have no connection that could be lost. The statement sees the row as it
// was before its own update.
const TAKE_OVER: &str = formatcp!(
    "WITH former AS (
         SELECT c.action_id, a.name AS agent, n.name AS node FROM actions c
           LEFT JOIN agents a ON a.workspace_id = c.workspace_id AND a.agent_id = c.handler_agent_id
                             AND a.deleted_at IS NULL
           LEFT JOIN nodes n ON n.workspace_id = c.workspace_id AND n.node_id = coalesce(a.node_id, c.handler_node_id)
          WHERE c.workspace_id = $1 AND c.action_id = $2
            AND NOT coalesce(a.last_seen_at > relay_now() - make_interval(secs => $5), false)
            AND NOT coalesce(n.kind <> '{WS}', false)
            AND NOT EXISTS (
                SELECT FROM providers p
                 WHERE p.workspace_id = c.workspace_id AND p.node_id = coalesce(a.node_id, c.handler_node_id)
                   AND p.provider = coalesce(a.provider, c.provider, p.provider)
                   AND p.last_heartbeat_at > relay_now() - make_interval(secs => $5))
            FOR UPDATE OF c
     ), taken AS (
         UPDATE actions c SET handler_agent_id = $3, handler_node_id = $4, provider = NULL, claims_name = true
           FROM former WHERE c.workspace_id = $1 AND c.action_id = former.action_id
     )
     SELECT c.name, c.handler_agent_id, c.handler_node_id, c.provider,
            CASE WHEN c.handler_agent_id IS NULL THEN NULL ELSE former.agent END AS agent,
            CASE WHEN c.handler_agent_id IS NULL THEN former.node END AS node,
            (SELECT name FROM agents WHERE workspace_id = $1 AND agent_id = $3) AS new_agent,
            (SELECT name FROM nodes WHERE workspace_id = $1 AND node_id = $4) AS new_node
       FROM former JOIN actions c ON c.workspace_id = $1 AND c.action_id = former.action_id"
);

/// Gives an action to another handler if the former one is not live, and fails the former one's open invocations.
/// Returns the event of the take-over and the outcomes of the invocations; `None` if the handler is live.
async fn take_over_action(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    action: ActionId,
    new: &NewAction<'_>,
    epoch: Option<i64>,
) -> StoreResult<Option<(Event, OutcomeBatch)>> {
    let row = sqlx::query(TAKE_OVER)
        .bind(scope.workspace_id())
        .bind(action)
        .bind(new.handler_agent)
        .bind(new.handler_node)
        .bind(TAKE_OVER_AFTER.as_secs_f64())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("taking over an action"))?;
    let Some(row) = row else { return Ok(None) };
    let former: FormerHandler = decode_row("actions", &row)?;
    let failed = fail_open_invocations(tx, scope, &former.handler, actions::HANDLER_UNAVAILABLE, new.at, epoch).await?;
    let data = ActionTakenOver {
        name: new.name,
        handler_agent: former.new_agent.as_deref(),
        handler_node: former.new_node.as_deref(),
        former_handler_agent: former.agent.as_deref(),
        former_handler_node: former.node.as_deref(),
    };
    let event = Event::new(kind::ACTION_TAKEN_OVER, data.to_value());
    let event = match new.handler_agent {
        Some(agent) => event.by_agent(agent),
        None => event,
    };
    Ok(Some((event, failed)))
}

impl Store {
    /// Defines an action, or replaces the definition of the same handler. An action that a capability of the same node
    /// defined becomes a REST definition. An action whose handler has not been live for
    /// [`relay_domain::actions::TAKE_OVER_AFTER`] gets the new handler and keeps everything else.
    pub async fn define_action(&self, scope: WorkspaceScope, new: &NewAction<'_>) -> StoreResult<DefineOutcome> {
        let doing = "defining an action";
        let workspace = scope.workspace_id();
        // Before BEGIN: a take-over may write outcomes to mailboxes, and a transaction that was prepared before a
        // recovery must not number them after it.
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Serialises with capabilities of brokers, which claim names in the same table.
        capabilities::lock_names(&mut tx, scope).await?;
        let existing: Vec<(ActionId, bool, Option<AgentId>, Option<NodeId>)> = sqlx::query_as(
            "SELECT action_id, claims_name, handler_agent_id, handler_node_id FROM actions
              WHERE workspace_id = $1 AND name = $2 AND (claims_name OR handler_node_id = $3)",
        )
        .bind(workspace)
        .bind(new.name)
        .bind(new.handler_node)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let same_handler = |agent: &Option<AgentId>, node: &Option<NodeId>| {
            *agent == new.handler_agent && node.as_ref() == new.handler_node
        };
        let ours = existing.iter().find(|(_, _, agent, node)| same_handler(agent, node)).map(|(id, _, _, _)| *id);
        if let Some((other, ..)) = existing.iter().find(|(id, claims, _, _)| *claims && Some(*id) != ours) {
            // A definition of its own under the name that it would take over has to be deleted first.
            let taken_over = match ours {
                None => self.note_epoch(epoch, take_over_action(&mut tx, scope, *other, new, epoch).await)?,
                Some(_) => None,
            };
            let Some((event, failed)) = taken_over else { return Ok(DefineOutcome::NameTaken) };
            let recorded = events::append(&mut tx, scope, new.at, vec![event]).await?;
            tx.commit().await.map_err(StoreError::from_commit(doing))?;
            return Ok(DefineOutcome::TakenOver { recorded, failed });
        }
        // A new definition by the same handler is not counted. The count is exact, because every insertion holds the
        // lock of the names.
        let written = sqlx::query(
            "INSERT INTO actions (workspace_id, action_id, name, description, claims_name, handler_agent_id,
                                  handler_node_id, input_schema, output_schema, available_to, created_at)
             SELECT $1, $2, $3, $4, true, $5, $6, $7, $8, $9, $10
              WHERE $11 OR (SELECT count(*) FROM actions WHERE workspace_id = $1) < $12
             ON CONFLICT (workspace_id, action_id) DO UPDATE
                SET description = excluded.description, claims_name = true, provider = NULL,
                    input_schema = excluded.input_schema, output_schema = excluded.output_schema,
                    available_to = excluded.available_to",
        )
        .bind(workspace)
        .bind(ours.unwrap_or(new.action_id))
        .bind(new.name)
        .bind(new.description)
        .bind(new.handler_agent)
        .bind(new.handler_node)
        .bind(new.input_schema)
        .bind(new.output_schema)
        .bind(new.available_to)
        .bind(new.at)
        .bind(ours.is_some())
        .bind(new.limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if written.rows_affected() == 0 {
            return Ok(DefineOutcome::TooMany);
        }
        let recorded = events::append(&mut tx, scope, new.at, vec![new.event.clone()]).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(DefineOutcome::Stored { new: ours.is_none(), recorded })
    }

    /// Deletes an action and fails its open invocations. Returns their outcomes; `None` if the action does not
    /// exist.
    pub async fn delete_action(
        &self,
        scope: WorkspaceScope,
        action: ActionId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<OutcomeBatch>> {
        let doing = "deleting an action";
        let epoch = self.epoch(doing)?;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Before the deletion: a definition of the same name waits, and then finds the name free.
        capabilities::lock_names(&mut tx, scope).await?;
        let handler: Option<ActionHandler> = sqlx::query_as(
            "DELETE FROM actions WHERE workspace_id = $1 AND action_id = $2
             RETURNING name, handler_agent_id, handler_node_id, provider",
        )
        .bind(scope.workspace_id())
        .bind(action)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(handler) = handler else { return Ok(None) };
        let failed = fail_open_invocations(&mut tx, scope, &handler, actions::ACTION_DELETED, at, epoch).await;
        let failed = self.note_epoch(epoch, failed)?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some(failed))
    }
}

/// Fails the open invocations that this handler has of its action, at most
/// [`actions::MAX_OPEN_PER_ACTION`]. Only events may follow in the transaction.
///
/// An invocation that is being created by another transaction is not seen. It stays with the handler, and fails in time
/// if that is unavailable.
async fn fail_open_invocations(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    handler: &ActionHandler,
    error: &'static str,
    at: DateTime<Utc>,
    epoch: Option<i64>,
) -> StoreResult<OutcomeBatch> {
    // A spawn has the name `spawn` and the capability of the action. An invocation that moved from the handler's
    // expired node names no node any more.
    // The inputs, of up to 768 KiB each, are not read: no outcome contains them.
    let statement = formatcp!(
        "WITH open AS MATERIALIZED (
             SELECT i.invocation_id FROM invocations i
              WHERE i.workspace_id = $1 AND i.completed_at IS NULL AND coalesce(i.capability, i.action_name) = $2
                AND CASE WHEN $3::bigint IS NULL
                         THEN i.handler_agent_id IS NULL AND NOT i.only_capacity AND CASE WHEN i.target_node_id IS NULL THEN $4 = ANY (i.tried)
                                       ELSE i.target_node_id = $4 AND i.target_provider IS NOT DISTINCT FROM $5 END
                         ELSE i.handler_agent_id = $3 END
              ORDER BY i.invocation_id FOR UPDATE OF i
         )
         UPDATE invocations i SET status = 'failed', error = $6, reserves = false, completed_at = $7
           FROM open WHERE i.workspace_id = $1 AND i.invocation_id = open.invocation_id
         RETURNING {COLUMNS_WITHOUT_INPUT}, '{{}}'::json AS input"
    );
    let rows = sqlx::query(statement)
        .bind(scope.workspace_id())
        .bind(&handler.name)
        .bind(handler.handler_agent_id)
        .bind(&handler.handler_node_id)
        .bind(&handler.provider)
        .bind(error)
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("failing the open invocations of an action"))?;
    deliver_outcomes(tx, decode_invocations(&rows)?, at, epoch).await
}
