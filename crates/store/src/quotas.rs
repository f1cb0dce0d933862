//! What workspaces may use: their plans, and what operators set apart from those.

use relay_domain::{
    WorkspaceScope,
    plan::{OwnLimits, Plan},
};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult};

/// A workspace's plan and its own limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotasRow {
    /// Its plan.
    pub plan: Plan,
    /// What differs from the plan.
    pub own: OwnLimits,
    /// What commits and workers go by.
    pub in_force: LimitsInForce,
}

/// Limits that lie in the workspace's own row, where commits and workers read them. They follow from the plan and the own
/// limits, which gateways work out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitsInForce {
    /// Unsettled deliveries that a mailbox takes.
    pub mailbox_depth: u32,
    /// Days of messages, if fewer than the installation keeps.
    pub message_days: Option<u32>,
}

impl FromRow<'_, PgRow> for QuotasRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        // CHECKs keep them from being negative.
        let count = |column: &str| row.try_get::<Option<i32>, _>(column).map(|count| count.map(i32::unsigned_abs));
        Ok(Self {
            plan: Plan::parse(row.try_get("plan")?).unwrap_or(Plan::Free),
            own: OwnLimits {
                requests_per_minute: count("requests_per_minute")?,
                agents: count("agents")?,
                channels: count("channels")?,
                nodes: count("nodes")?,
                webhooks: count("webhooks")?,
                subscriptions: count("subscriptions")?,
                observer_tokens: count("observer_tokens")?,
                file_bytes: row.try_get("file_bytes")?,
                mailbox_depth: count("mailbox_depth")?,
                message_days: count("message_days")?,
            },
            in_force: LimitsInForce {
                mailbox_depth: count("depth_in_force")?.unwrap_or_default(),
                message_days: count("days_in_force")?,
            },
        })
    }
}

macro_rules! own_columns {
    () => {
        "requests_per_minute, agents, channels, nodes, webhooks, subscriptions, observer_tokens, file_bytes"
    };
}

impl Store {
    /// The plan and own limits of a workspace, if it is alive.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn quotas(&self, scope: WorkspaceScope) -> StoreResult<Option<QuotasRow>> {
        sqlx::query_as(concat!(
            "SELECT w.plan, w.mailbox_depth AS depth_in_force, w.message_days AS days_in_force,
                    q.mailbox_depth, q.message_days, ",
            own_columns!(),
            " FROM workspaces w LEFT JOIN quotas q USING (workspace_id)
              WHERE w.workspace_id = $1 AND w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > now())"
        ))
        .bind(scope.workspace_id().get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a workspace's quotas"))
    }

    /// Puts a workspace on a plan, if one is given, and replaces its own limits. False when it is gone.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn set_quotas(&self, scope: WorkspaceScope, plan: Option<Plan>, own: &OwnLimits) -> StoreResult<bool> {
        let count = |count: Option<u32>| count.map(|count| i32::try_from(count).unwrap_or(i32::MAX));
        let set: Option<i64> = sqlx::query_scalar(concat!(
            "WITH workspace AS (
                UPDATE workspaces SET plan = coalesce($2, plan)
                 WHERE workspace_id = $1 AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
                RETURNING workspace_id
             )
             INSERT INTO quotas (workspace_id, ",
            own_columns!(),
            ", mailbox_depth, message_days)
             SELECT workspace_id, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12 FROM workspace
             ON CONFLICT (workspace_id) DO UPDATE SET
                requests_per_minute = excluded.requests_per_minute, agents = excluded.agents,
                channels = excluded.channels, nodes = excluded.nodes, webhooks = excluded.webhooks,
                subscriptions = excluded.subscriptions, observer_tokens = excluded.observer_tokens,
                file_bytes = excluded.file_bytes, mailbox_depth = excluded.mailbox_depth,
                message_days = excluded.message_days, updated_at = now()
             RETURNING workspace_id"
        ))
        .bind(scope.workspace_id().get())
        .bind(plan.map(Plan::as_str))
        .bind(count(own.requests_per_minute))
        .bind(count(own.agents))
        .bind(count(own.channels))
        .bind(count(own.nodes))
        .bind(count(own.webhooks))
        .bind(count(own.subscriptions))
        .bind(count(own.observer_tokens))
        .bind(own.file_bytes)
        .bind(count(own.mailbox_depth))
        .bind(count(own.message_days))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("setting a workspace's quotas"))?;
        Ok(set.is_some())
    }
    /// Lets commits and workers go by other limits of a workspace.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn put_in_force(&self, scope: WorkspaceScope, limits: LimitsInForce) -> StoreResult<()> {
        let count = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        sqlx::query(
            "UPDATE workspaces SET mailbox_depth = $2, message_days = $3
              WHERE workspace_id = $1 AND (mailbox_depth, message_days) IS DISTINCT FROM ($2, $3)",
        )
        .bind(scope.workspace_id().get())
        .bind(count(limits.mailbox_depth))
        .bind(limits.message_days.map(count))
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("putting a workspace's limits in force"))?;
        Ok(())
    }
}
