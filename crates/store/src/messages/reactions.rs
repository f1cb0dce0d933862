//! Reactions to messages. An agent has at most one reaction per message and emoji. Called by the engine.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, MessageId, ReactionId, WorkspaceScope, messages::ReactionCount, names::MAX_DISTINCT_EMOJI,
};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Event, RecordedEvents},
};

#[derive(Debug, Clone, Copy)]
pub struct ReactionKey<'a> {
    pub message: MessageId,
    pub agent: AgentId,
    pub emoji: &'a str,
}

/// A reaction to add.
#[derive(Debug, Clone, Copy)]
pub struct NewReaction<'a> {
    pub key: ReactionKey<'a>,
    /// The author of the message.
    pub author: AgentId,
    pub id: ReactionId,
}

/// A stored reaction.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub struct Reaction {
    pub reaction_id: ReactionId,
    pub created_at: DateTime<Utc>,
}

/// Outcome of adding a reaction.
#[derive(Debug)]
pub enum ReactionOutcome {
    Added(Reaction, RecordedEvents),
    /// The agent had reacted with this emoji before.
    Present(Reaction),
    /// The message has [`MAX_DISTINCT_EMOJI`] other emoji.
    Full,
}

impl Store {
    /// Adds a reaction and records `event` if it is new.
    pub async fn add_reaction(
        &self,
        scope: WorkspaceScope,
        new: &NewReaction<'_>,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<ReactionOutcome> {
        let doing = "adding a reaction";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The limit is checked without a lock: concurrent first reactions may exceed it by a few, which costs
        // nothing but a longer list.
        let added: Option<Reaction> = sqlx::query_as(
            "INSERT INTO message_reactions
                    (workspace_id, message_id, emoji, agent_id, reaction_id, author_id, created_at)
             SELECT $1, $2, $3, $4, $5, $6, $7
              WHERE (SELECT count(*) FROM (SELECT FROM message_reactions
                                            WHERE workspace_id = $1 AND message_id = $2 AND emoji <> $3
                                            GROUP BY emoji LIMIT $8) AS others) < $8
             ON CONFLICT DO NOTHING
             RETURNING reaction_id, created_at",
        )
        .bind(scope.workspace_id())
        .bind(new.key.message)
        .bind(new.key.emoji)
        .bind(new.key.agent)
        .bind(new.id)
        .bind(new.author)
        .bind(at)
        .bind(MAX_DISTINCT_EMOJI)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if let Some(reaction) = added {
            let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
            return Ok(ReactionOutcome::Added(reaction, recorded));
        }
        // Finds the reaction that conflicted: under READ COMMITTED each statement has a snapshot of its own.
        let present: Option<Reaction> = sqlx::query_as(
            "SELECT reaction_id, created_at FROM message_reactions
              WHERE workspace_id = $1 AND message_id = $2 AND emoji = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id())
        .bind(new.key.message)
        .bind(new.key.emoji)
        .bind(new.key.agent)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        Ok(present.map_or(ReactionOutcome::Full, ReactionOutcome::Present))
    }

    /// Removes a reaction and records `event`. `None` without such a reaction.
    pub async fn remove_reaction(
        &self,
        scope: WorkspaceScope,
        key: ReactionKey<'_>,
        at: DateTime<Utc>,
        event: Event,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "removing a reaction";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let removed = sqlx::query(
            "DELETE FROM message_reactions
              WHERE workspace_id = $1 AND message_id = $2 AND emoji = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id())
        .bind(key.message)
        .bind(key.emoji)
        .bind(key.agent)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?
        .rows_affected();
        if removed == 0 {
            return Ok(None);
        }
        let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Lists the reactions to a message by emoji, the earliest emoji first, with at most `names` names each.
    pub async fn reactions(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        names: i32,
    ) -> StoreResult<Vec<ReactionCount>> {
        let rows: Vec<(String, i64, Vec<String>)> = sqlx::query_as(
            "SELECT r.emoji, count(*) AS count, (array_agg(a.name ORDER BY r.reaction_id))[1:$3] AS agents
               FROM message_reactions r
               JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id
              WHERE r.workspace_id = $1 AND r.message_id = $2
              GROUP BY r.emoji ORDER BY min(r.reaction_id)",
        )
        .bind(scope.workspace_id())
        .bind(message)
        .bind(names)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing reactions"))?;
        Ok(rows.into_iter().map(|(emoji, count, agents)| ReactionCount { emoji, count, agents }).collect())
    }
}
