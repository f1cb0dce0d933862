//! Pages of due deliveries, read by the worker that holds the leases of their mailboxes. Main types: [`PushPage`] and
//! [`PushRow`].

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, PushWorkerId, WorkspaceId,
    mailboxes::stream::Seq,
    push::mailbox::{LeasedMailbox, PAGE, PushPage, PushRow},
};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::DEFERRED,
    decode::decode_rows,
    mailboxes::replay::{COLUMNS, SOURCE_JOINS, StoredDeliveryRow},
    statement_timeout::StatementTimeout as _,
    workspaces::suspensions::is_suspended,
};

// A mailbox without a row in `push_mailboxes` is not leased.
const STATES: &str = concatcp!(
    "
SELECT k.workspace_id, k.agent_id,
       coalesce(p.owner = $1 AND p.epoch = k.epoch AND p.disabled_at IS NULL AND a.agent_id IS NOT NULL, false)
       AND NOT ",
    is_suspended!("k"),
    " AS is_leased,
       (SELECT min(e.available_at) FROM delivery_exceptions e
         WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq > c.settled_floor
           AND e.seq <= k.pushed_seq AND e.state = ",
    DEFERRED,
    " AND e.available_at > relay_now()) AS next_redelivery_at
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
       AS k (workspace_id, agent_id, epoch, pushed_seq)
  LEFT JOIN push_mailboxes p ON p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
  LEFT JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_cursors c ON c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id"
);

// Two reads per mailbox, each bounded by $5: rows above the push position, and deferred rows below it that are due
// again.
// A deferral by a failed attempt has a retry number. One by the consumer has none, or comes from a failure that the
// consumer reported, which alone sets `retryable`.
const ROWS: &str = concatcp!(
    "SELECT ",
    COLUMNS,
    ", m.traceparent, x.available_at, coalesce(x.retry_no, 0::smallint) AS retry_no,
            coalesce(x.retry_no = 0 OR x.retryable IS NOT NULL, false) AS is_deferred_by_consumer, d.is_redelivery
       FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, pushed_seq)
       JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
      CROSS JOIN LATERAL (
            (SELECT d.*, false AS is_redelivery FROM deliveries d
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
                AND e.state = ",
    DEFERRED,
    " AND e.available_at <= relay_now()
              ORDER BY e.seq LIMIT $5)) AS d
       ",
    SOURCE_JOINS
);

/// Row of [`STATES`].
#[derive(FromRow)]
struct MailboxState {
    workspace_id: WorkspaceId,
    agent_id: AgentId,
    is_leased: bool,
    next_redelivery_at: Option<DateTime<Utc>>,
}

struct PageRow(PushRow);

impl FromRow<'_, PgRow> for PageRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(PushRow {
            delivery: StoredDeliveryRow::from_row(row)?.0,
            traceparent: row.try_get("traceparent")?,
            available_at: row.try_get("available_at")?,
            retry_no: row.try_get("retry_no")?,
            is_deferred_by_consumer: row.try_get("is_deferred_by_consumer")?,
            is_redelivery: row.try_get("is_redelivery")?,
        }))
    }
}

impl Store {
    /// Reads one page of each mailbox above its push position, in the order given, without contents. Partitions before
    /// the day of `since` are not read.
    pub async fn read_push_pages(
        &self,
        owner: PushWorkerId,
        mailboxes: &[(LeasedMailbox, Seq)],
        since: DateTime<Utc>,
    ) -> StoreResult<Vec<PushPage>> {
        let doing = "reading mailboxes to be pushed";
        let workspaces: Vec<WorkspaceId> = mailboxes.iter().map(|(m, _)| m.scope.workspace_id()).collect();
        let agents: Vec<AgentId> = mailboxes.iter().map(|(m, _)| m.agent_id).collect();
        let pushed: Vec<Seq> = mailboxes.iter().map(|(_, seq)| *seq).collect();
        // State before rows: a lease that is lost in between is noticed when the attempts are recorded.
        let states: Vec<MailboxState> = sqlx::query_as(STATES)
            .bind(owner)
            .bind(&workspaces)
            .bind(&agents)
            .bind(mailboxes.iter().map(|(m, _)| m.epoch).collect::<Vec<_>>())
            .bind(&pushed)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(ROWS)
            .bind(&workspaces)
            .bind(&agents)
            .bind(&pushed)
            .bind(since.date_naive())
            .bind(PAGE)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(build_pages(mailboxes, &states, decode_rows("deliveries", &rows)?))
    }
}

/// Distributes rows over the pages of their mailboxes.
fn build_pages(mailboxes: &[(LeasedMailbox, Seq)], states: &[MailboxState], rows: Vec<PageRow>) -> Vec<PushPage> {
    let page = |(mailbox, _): &(LeasedMailbox, Seq)| {
        let key = (mailbox.scope.workspace_id(), mailbox.agent_id);
        let state = states.iter().find(|state| (state.workspace_id, state.agent_id) == key);
        PushPage {
            scope: mailbox.scope,
            agent_id: mailbox.agent_id,
            is_leased: state.is_some_and(|state| state.is_leased),
            next_redelivery_at: state.and_then(|state| state.next_redelivery_at),
            rows: Vec::new(),
            has_more: false,
        }
    };
    let mut pages: Vec<PushPage> = mailboxes.iter().map(page).collect();
    // Rows of one mailbox are adjacent, so the page of the previous row is tried first.
    let mut at = 0;
    for PageRow(row) in rows {
        let is_of = |page: &PushPage| page.scope == row.delivery.scope && page.agent_id == row.delivery.agent_id;
        if !pages.get(at).is_some_and(is_of) {
            at = pages.iter().position(is_of).unwrap_or(pages.len());
        }
        if let Some(page) = pages.get_mut(at) {
            page.rows.push(row);
        }
    }
    // Sorted here, because Postgres would sort whole rows, which costs more than reading them.
    for page in &mut pages {
        page.rows.sort_by_key(|row| (!row.is_redelivery, row.delivery.seq));
        page.has_more = i64::try_from(page.rows.len()).is_ok_and(|rows| rows >= PAGE);
    }
    pages
}
