//! Plans of workspaces and the limits that operators set apart from them.

use const_format::formatcp;
use relay_domain::{
    WorkspaceScope,
    workspaces::plan::{LimitOverrides, Plan},
};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, to_count},
};

/// Plan and limits of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotasRow {
    pub plan: Plan,
    /// Limits that replace those of the plan.
    pub overrides: LimitOverrides,
    /// Limits that commits and workers apply.
    pub effective: EffectiveLimits,
}

/// Limits stored in the workspace's own row, where commits and workers read them without a join. Gateways derive them
/// from the plan and the overrides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EffectiveLimits {
    /// Maximum number of unsettled deliveries in a mailbox.
    pub mailbox_depth: u32,
    /// Retention of messages in days, if shorter than that of the installation.
    pub message_days: Option<u32>,
}

impl FromRow<'_, PgRow> for QuotasRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let count = |column| optional_count(row, column);
        Ok(Self {
            plan: row.try_get("plan")?,
            overrides: LimitOverrides {
                requests_per_minute: count("requests_per_minute")?,
                agents: count("agents")?,
                channels: count("channels")?,
                nodes: count("nodes")?,
                webhooks: count("webhooks")?,
                subscriptions: count("subscriptions")?,
                observer_tokens: count("observer_tokens")?,
                file_bytes: row.try_get("file_bytes")?,
                child_workspaces: count("child_workspaces")?,
                mailbox_depth: count("mailbox_depth")?,
                message_days: count("message_days")?,
            },
            effective: EffectiveLimits {
                mailbox_depth: required_count(row, "depth_in_force")?,
                message_days: count("days_in_force")?,
            },
        })
    }
}

fn optional_count(row: &PgRow, column: &str) -> sqlx::Result<Option<u32>> {
    row.try_get::<Option<i32>, _>(column)?.map(|count| to_count(column, count)).transpose()
}

fn required_count(row: &PgRow, column: &str) -> sqlx::Result<u32> {
    to_count(column, row.try_get::<i32, _>(column)?)
}

const OVERRIDE_COLUMNS: &str = "requests_per_minute, agents, channels, nodes, webhooks, subscriptions, observer_tokens, file_bytes, child_workspaces";

impl Store {
    /// Returns the plan and limits of a workspace unless it is deleted or expired.
    pub async fn quotas(&self, scope: WorkspaceScope) -> StoreResult<Option<QuotasRow>> {
        let row = sqlx::query(formatcp!(
            "SELECT w.plan, w.mailbox_depth AS depth_in_force, w.message_days AS days_in_force,
                    q.mailbox_depth, q.message_days, {OVERRIDE_COLUMNS}
               FROM workspaces w LEFT JOIN quotas q USING (workspace_id)
              WHERE w.workspace_id = $1 AND w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > relay_now())"
        ))
        .bind(scope.workspace_id())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a workspace's quotas"))?;
        row.map(|row| decode_row("workspaces", &row)).transpose()
    }

    /// Sets the plan of a workspace and its child workspaces, if one is given, and replaces its overrides. Returns
    /// false if it is deleted or expired.
    pub async fn set_quotas(
        &self,
        scope: WorkspaceScope,
        plan: Option<Plan>,
        overrides: &LimitOverrides,
    ) -> StoreResult<bool> {
        // A quota above the range of the column is never reached.
        let count = |count: Option<u32>| count.map(|count| i32::try_from(count).unwrap_or(i32::MAX));
        // Without a plan the children stay as they are: no row satisfies a comparison with null.
        let set: Option<i64> = sqlx::query_scalar(formatcp!(
            "WITH workspace AS (
                UPDATE workspaces SET plan = coalesce($2, plan)
                 WHERE workspace_id = $1 AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > relay_now())
                RETURNING workspace_id
             ), children AS (
                UPDATE workspaces w SET plan = $2 FROM workspace
                 WHERE w.created_by = workspace.workspace_id AND w.plan <> $2
             )
             INSERT INTO quotas (workspace_id, {OVERRIDE_COLUMNS}, mailbox_depth, message_days)
             SELECT workspace_id, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13 FROM workspace
             ON CONFLICT (workspace_id) DO UPDATE SET
                requests_per_minute = excluded.requests_per_minute, agents = excluded.agents,
                channels = excluded.channels, nodes = excluded.nodes, webhooks = excluded.webhooks,
                subscriptions = excluded.subscriptions, observer_tokens = excluded.observer_tokens,
                file_bytes = excluded.file_bytes, child_workspaces = excluded.child_workspaces,
                mailbox_depth = excluded.mailbox_depth,
                message_days = excluded.message_days, updated_at = relay_now()
             RETURNING workspace_id"
        ))
        .bind(scope.workspace_id())
        .bind(plan)
        .bind(count(overrides.requests_per_minute))
        .bind(count(overrides.agents))
        .bind(count(overrides.channels))
        .bind(count(overrides.nodes))
        .bind(count(overrides.webhooks))
        .bind(count(overrides.subscriptions))
        .bind(count(overrides.observer_tokens))
        .bind(overrides.file_bytes)
        .bind(count(overrides.child_workspaces))
        .bind(count(overrides.mailbox_depth))
        .bind(count(overrides.message_days))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("setting a workspace's quotas"))?;
        Ok(set.is_some())
    }

    /// Replaces the limits that commits and workers apply to a workspace.
    pub async fn set_effective_limits(&self, scope: WorkspaceScope, limits: EffectiveLimits) -> StoreResult<()> {
        let count = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        // Every gateway that reads the quotas may find the same difference; only the first writes a new row version.
        sqlx::query(
            "UPDATE workspaces SET mailbox_depth = $2, message_days = $3
              WHERE workspace_id = $1 AND (mailbox_depth, message_days) IS DISTINCT FROM ($2, $3)",
        )
        .bind(scope.workspace_id())
        .bind(count(limits.mailbox_depth))
        .bind(limits.message_days.map(count))
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("storing the effective limits of a workspace"))?;
        Ok(())
    }
}
