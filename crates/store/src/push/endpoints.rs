//! Endpoints of http_push nodes: their call settings and their health, which all workers share. Main type:
//! [`EndpointRow`]; called by `relay_engine::push`.

use const_format::formatcp;
use std::time::Duration;

use relay_domain::{
    NodeId, WorkspaceScope,
    push::{
        endpoint::{EndpointHealth, EndpointReport},
        settings::EndpointSettings,
    },
    workspaces::family::FamilyId,
};
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult, codes::HTTP_PUSH, decode::decode_row, statement_timeout::StatementTimeout as _,
    subscriptions::definitions::EncryptedSecret,
};

/// Call settings of an http_push node, with the health of its endpoint.
#[derive(Debug, Clone)]
pub struct EndpointRow {
    /// Tenant that its calls count for.
    pub family: FamilyId,
    pub settings: EndpointSettings,
    pub secret: Option<EncryptedSecret>,
    pub health: EndpointHealth,
}

impl FromRow<'_, PgRow> for EndpointRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let Json(settings) = row.try_get("delivery")?;
        let key_id: Option<String> = row.try_get("sealed_key_id")?;
        let bytes: Option<Vec<u8>> = row.try_get("sealed")?;
        Ok(Self {
            family: FamilyId::of_workspace(row.try_get("family")?, None),
            settings,
            secret: key_id.zip(bytes).map(|(key_id, bytes)| EncryptedSecret { key_id, bytes }),
            health: HealthRow::from_row(row)?.0,
        })
    }
}

/// Health columns of `push_endpoints`.
struct HealthRow(EndpointHealth);

impl FromRow<'_, PgRow> for HealthRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(EndpointHealth {
            failures: row.try_get("failures")?,
            open_until: row.try_get("open_until")?,
            paused_until: row.try_get("paused_until")?,
        }))
    }
}

impl Store {
    /// Reads the endpoint of an http_push node. `None` when there is no such node.
    pub async fn push_endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<EndpointRow>> {
        let row = sqlx::query(formatcp!(
            "SELECT n.node_id, n.delivery, n.sealed_key_id, n.sealed, coalesce(w.created_by, n.workspace_id) AS family,
                    coalesce(e.failures, 0) AS failures, e.open_until, e.paused_until
               FROM nodes n
               LEFT JOIN workspaces w ON w.workspace_id = n.workspace_id
               LEFT JOIN push_endpoints e ON e.workspace_id = n.workspace_id AND e.node_id = n.node_id
              WHERE n.workspace_id = $1 AND n.node_id = $2 AND n.kind = '{HTTP_PUSH}'"
        ))
        .bind(scope.workspace_id())
        .bind(node)
        .fetch_optional(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("reading an endpoint"))?;
        row.map(|row| decode_row("nodes", &row)).transpose()
    }

    /// Adds a report, and returns the endpoint's health. The breaker opens at `limit` consecutive failures, and again
    /// at every further failure.
    pub async fn record_endpoint_report(
        &self,
        report: &EndpointReport,
        limit: i32,
        open_for: Duration,
    ) -> StoreResult<EndpointHealth> {
        // One upsert: several workers may report the same endpoint at once, and the counter must lose none.
        // Any report ends a probe. A pause is only extended, because reports arrive in any order.
        let health: HealthRow = sqlx::query_as(
            "INSERT INTO push_endpoints AS e (workspace_id, node_id, failures, open_until, paused_until)
             VALUES ($1, $2, $3::int, CASE WHEN $3::int >= $6::int THEN relay_now() + make_interval(secs => $7) END, $5::timestamptz)
             ON CONFLICT (workspace_id, node_id) DO UPDATE
                SET failures = CASE WHEN $4::boolean THEN 0 ELSE e.failures END + $3::int,
                    open_until = CASE
                        WHEN $3::int > 0 AND CASE WHEN $4::boolean THEN 0 ELSE e.failures END + $3::int >= $6::int
                            THEN relay_now() + make_interval(secs => $7)
                        WHEN $4::boolean THEN NULL ELSE e.open_until END,
                    probe_until = NULL,
                    paused_until = coalesce(greatest(e.paused_until, $5::timestamptz), e.paused_until)
            RETURNING failures, open_until, paused_until",
            )
        .bind(report.scope.workspace_id())
        .bind(&report.node_id)
        .bind(report.failures)
        .bind(report.succeeded)
        .bind(report.paused_until)
        .bind(limit)
        .bind(open_for.as_secs_f64())
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("recording an endpoint report"))?;
        Ok(health.0)
    }

    /// Claims the single probe that an endpoint gets after its breaker's open period. The claim lasts for `ttl`, so
    /// that another worker probes if this one stops. Returns whether the claim succeeded.
    pub async fn claim_endpoint_probe(&self, scope: WorkspaceScope, node: &NodeId, ttl: Duration) -> StoreResult<bool> {
        // The row lock lets one of several workers pass; the others see its `probe_until`.
        let claimed = sqlx::query(
            "UPDATE push_endpoints SET probe_until = relay_now() + make_interval(secs => $3)
              WHERE workspace_id = $1 AND node_id = $2 AND open_until <= relay_now()
                AND (probe_until IS NULL OR probe_until <= relay_now())",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(ttl.as_secs_f64())
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("claiming the probe of an endpoint"))?;
        Ok(claimed.rows_affected() > 0)
    }
}
