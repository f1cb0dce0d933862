//! Reactions to messages. One agent reacts to one message with one emoji at most once.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, MessageId, WorkspaceScope, names::MAX_DISTINCT_EMOJI};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
};

/// A reaction to be added.
#[derive(Debug, Clone, Copy)]
pub struct NewReaction<'a> {
    /// To which message.
    pub message: MessageId,
    /// Who wrote it.
    pub author: AgentId,
    /// Who reacts.
    pub agent: AgentId,
    /// With what.
    pub emoji: &'a str,
    /// The id that it gets if it is new.
    pub id: i64,
}

/// A reaction that is there.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub struct Reaction {
    /// Its id.
    pub reaction_id: i64,
    /// Since when.
    pub created_at: DateTime<Utc>,
}

/// What became of a reaction.
#[derive(Debug)]
pub enum Reacted {
    /// It is new.
    Added(Reaction, Recorded),
    /// It was there before.
    Present(Reaction),
    /// The message has [`MAX_DISTINCT_EMOJI`] others.
    Full,
}

/// All reactions to a message with one emoji.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ReactionCount {
    /// The emoji.
    pub emoji: String,
    /// How many agents.
    pub count: i64,
    /// Their names in the order of reacting.
    pub agents: Vec<String>,
}

impl Store {
    /// Adds a reaction and records `event` if it is new.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn add_reaction(
        &self,
        scope: WorkspaceScope,
        new: &NewReaction<'_>,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Reacted> {
        let doing = "adding a reaction";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
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
        .bind(scope.workspace_id().get())
        .bind(new.message.get())
        .bind(new.emoji)
        .bind(new.agent.get())
        .bind(new.id)
        .bind(new.author.get())
        .bind(at)
        .bind(MAX_DISTINCT_EMOJI)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if let Some(reaction) = added {
            let recorded = events::append(&mut tx, scope, at, vec![event]).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
            return Ok(Reacted::Added(reaction, recorded));
        }
        let present: Option<Reaction> = sqlx::query_as(
            "SELECT reaction_id, created_at FROM message_reactions
              WHERE workspace_id = $1 AND message_id = $2 AND emoji = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(new.message.get())
        .bind(new.emoji)
        .bind(new.agent.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        Ok(present.map_or(Reacted::Full, Reacted::Present))
    }

    /// Removes a reaction and records `event`. `None` when there was none.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn remove_reaction(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        agent: AgentId,
        emoji: &str,
        at: DateTime<Utc>,
        event: NewEvent,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "removing a reaction";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let removed = sqlx::query(
            "DELETE FROM message_reactions
              WHERE workspace_id = $1 AND message_id = $2 AND emoji = $3 AND agent_id = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(emoji)
        .bind(agent.get())
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

    /// The reactions to a message by emoji, the earliest emoji first, with at most `names` names each.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn reactions(
        &self,
        scope: WorkspaceScope,
        message: MessageId,
        names: i32,
    ) -> StoreResult<Vec<ReactionCount>> {
        sqlx::query_as(
            "SELECT r.emoji, count(*) AS count, (array_agg(a.name ORDER BY r.reaction_id))[1:$3] AS agents
               FROM message_reactions r
               JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id
              WHERE r.workspace_id = $1 AND r.message_id = $2
              GROUP BY r.emoji ORDER BY min(r.reaction_id)",
        )
        .bind(scope.workspace_id().get())
        .bind(message.get())
        .bind(names)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing reactions"))
    }
}
