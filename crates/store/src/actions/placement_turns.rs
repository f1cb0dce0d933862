//! Turns of placements: transactions that place invocations of one workspace run one after the other, by an advisory
//! lock until their commit. Under READ COMMITTED, the next statement sees the reservations of the previous holder.
//! Called by [`super::invoke`] and [`super::redispatch`].

use std::collections::BTreeSet;

use relay_domain::{WorkspaceId, WorkspaceScope};
use sqlx::Row as _;

use crate::{
    Store, StoreError, StoreResult,
    connections::{DatabaseSession, Purpose, Transaction},
};

impl Store {
    /// Begins a transaction with the turns of the workspaces in which no other placement runs. Returns the workspaces
    /// in which one does as well. If there is a single workspace, waits for its turn: a batch of several would hold
    /// turns while it waits, and delay the other workspaces.
    ///
    /// The turns are taken in the message of BEGIN, which compares the recovery epoch, too.
    pub(crate) async fn begin_placing(
        &self,
        scopes: impl Iterator<Item = WorkspaceScope>,
        doing: &'static str,
    ) -> StoreResult<(Transaction, BTreeSet<WorkspaceScope>)> {
        let epoch = self.epoch(doing)?;
        let mut busy: BTreeSet<WorkspaceScope> = scopes.collect();
        let ids: Vec<String> = busy.iter().map(|scope| scope.workspace_id().get().to_string()).collect();
        // A message of several statements takes no parameters. The ids are numbers.
        let query = format!(
            "SELECT array_agg(w) FROM unnest('{{{}}}'::bigint[]) AS w
              WHERE pg_try_advisory_xact_lock(hashtextextended('placement', w))",
            ids.join(",")
        );
        let (mut tx, rows) =
            self.pool.begin_with(Purpose::Placements, &query).await.map_err(StoreError::from_sqlx(doing))?;
        // `array_agg` of no row is null: no turn was free.
        let taken: Option<Vec<WorkspaceId>> = match rows.last() {
            Some(row) => row.try_get(0).map_err(StoreError::from_sqlx(doing))?,
            None => None,
        };
        let taken = taken.unwrap_or_default();
        let is_alone = busy.len() == 1;
        busy.retain(|scope| !taken.contains(&scope.workspace_id()));
        if is_alone && !busy.is_empty() {
            self.note_epoch(epoch, wait_for_turns(&mut tx, &busy, epoch).await)?;
            busy.clear();
        }
        Ok((tx, busy))
    }
}

/// Waits for the turns of these workspaces, in one order: two batches with the same workspaces cannot deadlock.
pub(crate) async fn wait_for_turns(
    tx: &mut DatabaseSession,
    scopes: &BTreeSet<WorkspaceScope>,
    epoch: Option<i64>,
) -> StoreResult<()> {
    for scope in scopes {
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('placement', $1)) FROM relay_require_epoch($2)")
            .bind(scope.workspace_id())
            .bind(epoch)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx("waiting for a turn of placements"))?;
    }
    Ok(())
}
