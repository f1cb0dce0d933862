//! Where mailboxes stand after tries: their floors, and the rows that depart from them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use chrono::{DateTime, Utc};
use relay_domain::{dead_letter::DeadReason, session::Seq};
use sqlx::PgTransaction;

use crate::{
    StoreError, StoreResult,
    push_record::{Changes, Key, Locked},
};

/// Rows above an ack floor that are looked at to see whether it can be moved over them.
const LOOKED_OVER: i64 = 256;

// Rows, and runs of skipped numbers.
const SETTLED_ABOVE: &str = "
WITH k AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])
                  AS k (workspace_id, agent_id, above, upto)
)
SELECT k.workspace_id, k.agent_id, e.seq, e.seq
  FROM k
 CROSS JOIN LATERAL (
       SELECT seq, state FROM delivery_exceptions e
        WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq > k.above AND e.seq < k.upto
        ORDER BY e.seq LIMIT $5) AS e
 WHERE e.state IN (1, 4)
 UNION ALL
SELECT k.workspace_id, k.agent_id, greatest(s.first_seq, k.above + 1), s.last_seq
  FROM k
  JOIN skipped_seqs s ON s.workspace_id = k.workspace_id AND s.agent_id = k.agent_id
   AND s.last_seq > k.above AND s.last_seq < k.upto";

const MOVE: &str = "
WITH moved AS (
    UPDATE mailbox_cursors c
       SET sent_seq = greatest(c.sent_seq, k.sent), ack_floor = greatest(c.ack_floor, k.acked),
           settled_floor = greatest(c.settled_floor, k.acked)
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, sent, acked)
     WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id
)
INSERT INTO ack_log (workspace_id, agent_id, acked_at, created_on, ack_floor)
SELECT workspace_id, agent_id, date_trunc('second', now()), (now() AT TIME ZONE 'UTC')::date, acked
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, sent, acked)
 WHERE acked > 0
    ON CONFLICT (workspace_id, agent_id, acked_at, created_on)
    DO UPDATE SET ack_floor = greatest(ack_log.ack_floor, excluded.ack_floor)";

// Whoever else writes such a row has locked the cursor first, so none appears in between. An acknowledged or dead row
// stays what it is.
const EXCEPT: &str = "
INSERT INTO delivery_exceptions AS e
       (workspace_id, agent_id, seq, state, error, retryable, reason, available_at, retry_no, at)
SELECT workspace_id, agent_id, seq, state, error, CASE WHEN state = 4 THEN false END, reason, available_at, retry_no,
       now()
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::text[], $6::timestamptz[], $7::smallint[],
              $8::text[])
       AS k (workspace_id, agent_id, seq, state, error, available_at, retry_no, reason)
 ORDER BY workspace_id, agent_id, seq
    ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
       SET state = excluded.state, error = excluded.error, retryable = excluded.retryable, reason = excluded.reason,
           available_at = excluded.available_at, retry_no = excluded.retry_no, at = excluded.at
     WHERE (excluded.state = 1 AND e.state IN (2, 3)) OR (excluded.state IN (3, 4) AND e.state = 3)
RETURNING e.workspace_id, e.agent_id, e.seq";

/// Moves the floors as far as everything below is acknowledged or dead. Returns the acknowledged rows that lie
/// above a gap.
pub(crate) async fn move_floors(
    tx: &mut PgTransaction<'_>,
    locked: &BTreeMap<Key, Locked>,
    changes: &BTreeMap<Key, Changes>,
) -> StoreResult<BTreeSet<(Key, Seq)>> {
    let doing = "moving mailbox cursors after tries";
    let has_gap = |floor: Seq, acked: &BTreeSet<Seq>| {
        acked.last().is_some_and(|last| last - floor != i64::try_from(acked.len()).unwrap_or(0))
    };
    let gaps: Vec<(Key, Seq, Seq)> = changes
        .iter()
        .filter_map(|(key, own)| {
            let floor = locked.get(key)?.ack_floor;
            has_gap(floor, &own.acked).then(|| (*key, floor, own.acked.last().copied().unwrap_or(floor)))
        })
        .collect();
    // From the first number to the last of each run.
    let mut passable: BTreeMap<(Key, Seq), Seq> = BTreeMap::new();
    if !gaps.is_empty() {
        let rows: Vec<(i64, i64, Seq, Seq)> = sqlx::query_as(SETTLED_ABOVE)
            .bind(gaps.iter().map(|gap| gap.0.0).collect::<Vec<_>>())
            .bind(gaps.iter().map(|gap| gap.0.1).collect::<Vec<_>>())
            .bind(gaps.iter().map(|gap| gap.1).collect::<Vec<_>>())
            .bind(gaps.iter().map(|gap| gap.2).collect::<Vec<_>>())
            .bind(LOOKED_OVER)
            .fetch_all(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        passable.extend(rows.into_iter().map(|(workspace, agent, first, last)| (((workspace, agent), first), last)));
    }
    let mut alone = BTreeSet::new();
    let (mut workspaces, mut agents, mut sent, mut acked) = (vec![], vec![], vec![], vec![]);
    for (key, own) in changes {
        let Some(position) = locked.get(key) else { continue };
        let mut floor = position.ack_floor;
        let top = own.acked.last().copied().unwrap_or(floor);
        while floor < top {
            let next = floor + 1;
            floor = match passable.get(&(*key, next)) {
                Some(last) => *last,
                None if own.acked.contains(&next) => next,
                None => break,
            };
        }
        alone.extend(own.acked.range(floor + 1..).map(|seq| (*key, *seq)));
        let reached = top.max(own.delivered.last().copied().unwrap_or(0));
        if floor > position.ack_floor || !own.acked.is_empty() || !own.delivered.is_empty() {
            workspaces.push(key.0);
            agents.push(key.1);
            sent.push(reached);
            acked.push(if floor > position.ack_floor { floor } else { 0 });
        }
    }
    if !agents.is_empty() {
        sqlx::query(MOVE)
            .bind(workspaces)
            .bind(agents)
            .bind(sent)
            .bind(acked)
            .execute(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
    }
    Ok(alone)
}

/// How a row departs from the floors.
#[derive(Clone, Copy)]
pub(crate) enum State {
    Acked,
    /// Comes back then, after so many failures.
    Back(DateTime<Utc>, i16),
    Dead(DeadReason),
}

/// Rows that depart from the floors, as columns.
#[derive(Default)]
pub(crate) struct Exceptions<'a> {
    seen: HashSet<(Key, Seq)>,
    workspaces: Vec<i64>,
    agents: Vec<i64>,
    seqs: Vec<Seq>,
    states: Vec<i16>,
    errors: Vec<Option<&'a str>>,
    reasons: Vec<Option<&'static str>>,
    available: Vec<Option<DateTime<Utc>>>,
    retries: Vec<i16>,
}

impl<'a> Exceptions<'a> {
    pub(crate) fn push(&mut self, key: Key, seq: Seq, state: State, error: Option<&'a str>) {
        // A statement must not touch one row twice.
        if self.seen.insert((key, seq)) {
            let (code, reason, available_at, retry_no) = match state {
                State::Acked => (1, None, None, 0),
                State::Back(at, retry_no) => (3, None, Some(at), retry_no),
                State::Dead(reason) => (4, Some(reason.as_str()), None, 0),
            };
            self.workspaces.push(key.0);
            self.agents.push(key.1);
            self.seqs.push(seq);
            self.states.push(code);
            self.reasons.push(reason);
            self.errors.push(error);
            self.available.push(available_at);
            self.retries.push(retry_no);
        }
    }

    /// Returns the rows that have changed.
    pub(crate) async fn write(self, tx: &mut PgTransaction<'_>) -> StoreResult<BTreeSet<(Key, Seq)>> {
        if self.seqs.is_empty() {
            return Ok(BTreeSet::new());
        }
        let rows: Vec<(i64, i64, Seq)> = sqlx::query_as(EXCEPT)
            .bind(self.workspaces)
            .bind(self.agents)
            .bind(self.seqs)
            .bind(self.states)
            .bind(self.errors)
            .bind(self.available)
            .bind(self.retries)
            .bind(self.reasons)
            .fetch_all(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx("recording what tries have come to"))?;
        Ok(rows.into_iter().map(|(workspace, agent, seq)| ((workspace, agent), seq)).collect())
    }
}
