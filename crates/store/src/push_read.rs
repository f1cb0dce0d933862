//! What a worker reads of the mailboxes that it serves.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, session::Seq};
use sqlx::Row as _;

use crate::{
    Store, StoreError, StoreResult,
    holds::is_held,
    patience::Patient as _,
    push_mailboxes::TakenMailbox,
    replay::{COLUMNS, SOURCE_JOINS, StoredDelivery, stored},
};

/// Rows of one mailbox that one read brings of each sort.
pub const PAGE: i64 = 50;

/// A delivery that may be due.
#[derive(Debug, Clone)]
pub struct PushRow {
    /// The delivery.
    pub delivery: StoredDelivery,
    /// W3C trace context of its message, if that was traced.
    pub traceparent: Option<String>,
    /// Until when it was put off.
    pub available_at: Option<DateTime<Utc>>,
    /// How often it has failed.
    pub retry_no: i16,
    /// Whether its consumer put it off, rather than a try that failed.
    pub by_consumer: bool,
    /// Whether it was passed before and has come back.
    pub is_back: bool,
}

/// What a read of one mailbox brings.
#[derive(Debug)]
pub struct PushPage {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Whose mailbox.
    pub agent_id: AgentId,
    /// Whether the mailbox is still served by the one who asks, its agent still there, and its workspace not held.
    pub is_ours: bool,
    /// When the next row comes back that is put off now.
    pub next_back_at: Option<DateTime<Utc>>,
    /// Rows that have come back, then those behind what was handed over, each by seq.
    pub rows: Vec<PushRow>,
}

const STATE: &str = concat!(
    "
SELECT k.workspace_id, k.agent_id,
       coalesce(p.owner = $1 AND p.epoch = k.epoch AND p.disabled_at IS NULL AND a.agent_id IS NOT NULL, false)
       AND NOT ",
    is_held!("k"),
    " AS ours,
       (SELECT min(e.available_at) FROM delivery_exceptions e
         WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq > c.settled_floor
           AND e.seq <= k.pushed_seq AND e.state = 3 AND e.available_at > now()) AS next_back_at
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
       AS k (workspace_id, agent_id, epoch, pushed_seq)
  LEFT JOIN push_mailboxes p ON p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
  LEFT JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_cursors c ON c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id"
);

impl Store {
    /// Reads mailboxes that `owner` serves, one page each, in the order asked for.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn read_push_pages(
        &self,
        owner: i64,
        of: &[(TakenMailbox, Seq)],
        since: DateTime<Utc>,
    ) -> StoreResult<Vec<PushPage>> {
        let doing = "reading mailboxes to be pushed";
        let workspaces: Vec<i64> = of.iter().map(|(m, _)| m.scope.workspace_id().get()).collect();
        let agents: Vec<i64> = of.iter().map(|(m, _)| m.agent_id.get()).collect();
        let epochs: Vec<i64> = of.iter().map(|(m, _)| m.epoch).collect();
        let pushed: Vec<Seq> = of.iter().map(|(_, seq)| *seq).collect();
        let states: Vec<(i64, i64, bool, Option<DateTime<Utc>>)> = sqlx::query_as(STATE)
            .bind(owner)
            .bind(&workspaces)
            .bind(&agents)
            .bind(&epochs)
            .bind(&pushed)
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let query = format!(
            "SELECT {COLUMNS}, m.traceparent, x.available_at, coalesce(x.retry_no, 0::smallint) AS retry_no,
                    x.retry_no = 0 OR x.retryable IS NOT NULL AS by_consumer, d.is_back
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, pushed_seq)
               JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
              CROSS JOIN LATERAL (
                    (SELECT d.*, false AS is_back FROM deliveries d
                      WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id
                        AND d.seq > k.pushed_seq AND d.created_on >= $4
                      ORDER BY d.seq LIMIT $5)
                    UNION ALL
                    (SELECT d.*, true FROM delivery_exceptions e
                       JOIN deliveries d ON d.workspace_id = e.workspace_id AND d.agent_id = e.agent_id
                                        AND d.seq = e.seq AND d.created_on >= $4
                      WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq <= k.pushed_seq
                        AND e.seq > coalesce((SELECT c.settled_floor FROM mailbox_cursors c
                                               WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id), 0)
                        AND e.state = 3 AND e.available_at <= now()
                      ORDER BY e.seq LIMIT $5)) AS d
               {SOURCE_JOINS}"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(&workspaces)
            .bind(&agents)
            .bind(&pushed)
            .bind(since.date_naive())
            .bind(PAGE)
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut pages: Vec<PushPage> = of
            .iter()
            .map(|(mailbox, _)| {
                let key = (mailbox.scope.workspace_id().get(), mailbox.agent_id.get());
                let state = states.iter().find(|state| (state.0, state.1) == key);
                PushPage {
                    scope: mailbox.scope,
                    agent_id: mailbox.agent_id,
                    is_ours: state.is_some_and(|state| state.2),
                    next_back_at: state.and_then(|state| state.3),
                    rows: Vec::new(),
                }
            })
            .collect();
        // A mailbox's rows come one after the other: the page of the last one is most often the page of the next.
        let mut at = 0;
        for row in &rows {
            let delivery = stored(row);
            let is_of = |page: &PushPage| page.scope == delivery.scope && page.agent_id == delivery.agent_id;
            if !pages.get(at).is_some_and(is_of) {
                at = pages.iter().position(is_of).unwrap_or(pages.len());
            }
            let Some(page) = pages.get_mut(at) else { continue };
            page.rows.push(PushRow {
                delivery,
                traceparent: row.get("traceparent"),
                available_at: row.get("available_at"),
                retry_no: row.get("retry_no"),
                by_consumer: row.get::<Option<bool>, _>("by_consumer").unwrap_or(false),
                is_back: row.get("is_back"),
            });
        }
        // Sorting whole rows costs Postgres more than the reading.
        for page in &mut pages {
            page.rows.sort_by_key(|row| (!row.is_back, row.delivery.seq));
        }
        Ok(pages)
    }
}
