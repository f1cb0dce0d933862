//! What is known of the endpoints of http_push nodes: how they are called, and how they have been doing.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{NodeId, WorkspaceScope};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult, patience::Patient as _, subscriptions::Sealed};

/// An endpoint.
#[derive(Debug, Clone)]
pub struct EndpointRow {
    /// How it is called, without secrets.
    pub delivery: Option<Value>,
    /// Its secrets.
    pub sealed: Option<Sealed>,
    /// How it has been doing.
    pub health: EndpointHealth,
}

/// How an endpoint has been doing, by the judgement of all workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, sqlx::FromRow)]
pub struct EndpointHealth {
    /// Failures in a row.
    pub failures: i32,
    /// Not tried before this.
    pub open_until: Option<DateTime<Utc>>,
    /// Asked to be left alone until then.
    pub paused_until: Option<DateTime<Utc>>,
}

/// What tries have shown of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointNews {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// Failures since the last success.
    pub failures: i32,
    /// Whether a try succeeded.
    pub succeeded: bool,
    /// It asked to be left alone until then.
    pub paused_until: Option<DateTime<Utc>>,
}

impl Store {
    /// An http_push node's endpoint; `None` when there is no such node.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn push_endpoint(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<EndpointRow>> {
        type Row =
            (Option<Value>, Option<String>, Option<Vec<u8>>, Option<i32>, Option<DateTime<Utc>>, Option<DateTime<Utc>>);
        let row: Option<Row> = sqlx::query_as(
            "SELECT n.delivery, n.sealed_key_id, n.sealed, e.failures, e.open_until, e.paused_until
               FROM nodes n
               LEFT JOIN push_endpoints e ON e.workspace_id = n.workspace_id AND e.node_id = n.node_id
              WHERE n.workspace_id = $1 AND n.node_id = $2 AND n.kind = 'http_push'",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .fetch_optional(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("reading an endpoint"))?;
        Ok(row.map(|(delivery, key_id, bytes, failures, open_until, paused_until)| EndpointRow {
            delivery,
            sealed: key_id.zip(bytes).map(|(key_id, bytes)| Sealed { key_id, bytes }),
            health: EndpointHealth { failures: failures.unwrap_or(0), open_until, paused_until },
        }))
    }

    /// Adds what tries have shown, and answers how each endpoint is doing now, in the order given. The breaker opens
    /// at `limit` failures in a row, and again at each failure past them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn note_endpoints(
        &self,
        news: &[EndpointNews],
        limit: i32,
        open_for: Duration,
    ) -> StoreResult<Vec<EndpointHealth>> {
        let mut order: Vec<usize> = (0..news.len()).collect();
        order.sort_by(|a, b| {
            let key = |i: usize| (news[i].scope.workspace_id().get(), news[i].node_id.as_str());
            key(*a).cmp(&key(*b))
        });
        let mut health = vec![EndpointHealth::default(); news.len()];
        for index in order {
            let one = &news[index];
            health[index] = sqlx::query_as(
                "INSERT INTO push_endpoints AS e (workspace_id, node_id, failures, open_until, paused_until)
                 VALUES ($1, $2, $3::int, CASE WHEN $3::int >= $6::int THEN now() + make_interval(secs => $7) END, $5::timestamptz)
                 ON CONFLICT (workspace_id, node_id) DO UPDATE
                    SET failures = CASE WHEN $4::boolean THEN 0 ELSE e.failures END + $3::int,
                        open_until = CASE
                            WHEN $3::int > 0 AND CASE WHEN $4::boolean THEN 0 ELSE e.failures END + $3::int >= $6::int
                                THEN now() + make_interval(secs => $7)
                            WHEN $4::boolean THEN NULL ELSE e.open_until END,
                        probe_until = NULL,
                        paused_until = coalesce(greatest(e.paused_until, $5::timestamptz), e.paused_until)
                RETURNING failures, open_until, paused_until",
            )
            .bind(one.scope.workspace_id().get())
            .bind(one.node_id.as_str())
            .bind(one.failures)
            .bind(one.succeeded)
            .bind(one.paused_until)
            .bind(limit)
            .bind(open_for.as_secs_f64())
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("noting how an endpoint is doing"))?;
        }
        Ok(health)
    }

    /// Asks for the one try that an endpoint is given after its breaker has been open. Whether it is ours.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn probe_endpoint(&self, scope: WorkspaceScope, node: &NodeId, lasts: Duration) -> StoreResult<bool> {
        let taken = sqlx::query(
            "UPDATE push_endpoints SET probe_until = now() + make_interval(secs => $3)
              WHERE workspace_id = $1 AND node_id = $2 AND open_until <= now()
                AND (probe_until IS NULL OR probe_until <= now())",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(lasts.as_secs_f64())
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("asking to probe an endpoint"))?;
        Ok(taken.rows_affected() > 0)
    }
}
