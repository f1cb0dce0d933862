//! Lookups of tokens that are in no cache, in batches: each token in use is looked up once a second and process, and
//! thousands are new to a process when another one ends.

use std::{sync::Weak, time::Duration};

use relay_domain::access::token::TokenHash;
use relay_store::{StoreError, StoreResult, TokenLookup};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, QueueFull, Request, queue};
use tokio::time::Instant;

use crate::{Engine, Inner};

/// While this recent, an outage seen by one batch answers those that waited for it. Long enough to empty the queue,
/// short enough that no request is refused after Postgres is back.
const OUTAGE_BACKOFF: Duration = Duration::from_millis(50);

/// A token that was valid within the last minutes is known. The others are strangers: they have half of the queue, and
/// of each batch while known ones wait, so that a flood of invented tokens does not delay known callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Familiarity {
    Known,
    Stranger,
}

pub(crate) struct PresentedToken {
    hash: TokenHash,
    familiarity: Familiarity,
}

pub(crate) type LookupRequest = Request<PresentedToken, StoreResult<TokenLookup>>;

/// Receiving end of the queue.
pub(crate) type TokenLookups = Batches<LookupRequest, Familiarity>;

/// Half of the queue holds the agents that the largest number of sockets of one workspace brings at once.
const QUEUE: QueueConfig<LookupRequest, Familiarity> = QueueConfig {
    name: "token_lookups",
    max_items: 32_768,
    key_share: 2,
    // Items of one size: their number is the bound.
    max_bytes: u32::MAX,
    batch_items: 512,
    batch_bytes: usize::MAX,
    batch_weight: u64::MAX,
    interval: Duration::ZERO,
    linger: Linger::NONE,
    key: |request| request.item.familiarity,
    bytes: |_| size_of::<LookupRequest>(),
    weight: |_| 1,
};

/// Sending end of the queue.
pub(crate) struct TokenReader(BatchSender<LookupRequest, Familiarity>);

impl TokenReader {
    pub(crate) fn new() -> (Self, TokenLookups) {
        let (sender, lookups) = queue(QUEUE);
        (Self(sender), lookups)
    }

    /// Looks a token up.
    ///
    /// # Errors
    /// When too many are waiting; inside, when storage is unavailable or the token's row does not decode.
    pub(super) async fn look_up(
        &self,
        hash: TokenHash,
        familiarity: Familiarity,
    ) -> Result<StoreResult<TokenLookup>, QueueFull> {
        let answer = self.0.try_request(PresentedToken { hash, familiarity })?;
        // The reply is missing only when the task has ended, at the end of the process.
        Ok(answer.await.unwrap_or_else(|_| Err(unavailable())))
    }
}

fn unavailable() -> StoreError {
    StoreError::unavailable("looking up a token")
}

/// Looks tokens up until the engine is dropped.
pub(crate) async fn look_up_tokens(engine: Weak<Inner>, mut lookups: TokenLookups) {
    let mut unavailable_since: Option<Instant> = None;
    while let Some(batch) = lookups.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        // After a long batch many callers have given up, and their lookups would delay the others.
        let wanted = batch.into_iter().filter(|request| !request.reply.is_closed()).collect();
        let (tokens, replies) = Request::split(wanted);
        if unavailable_since.is_some_and(|at| at.elapsed() < OUTAGE_BACKOFF) {
            replies.into_iter().for_each(|reply| _ = reply.send(Err(unavailable())));
            continue;
        }
        let hashes: Vec<TokenHash> = tokens.iter().map(|token| token.hash).collect();
        match engine.store().look_up_tokens(&hashes).await {
            Ok(found) => {
                unavailable_since = None;
                found.into_iter().zip(replies).for_each(|(found, reply)| _ = reply.send(found));
            }
            Err(error) => {
                if error.is_unavailable() {
                    unavailable_since = Some(Instant::now());
                    tracing::debug!(error = &error as &dyn std::error::Error, "tokens not looked up");
                } else {
                    tracing::error!(error = &error as &dyn std::error::Error, "tokens not looked up");
                }
                replies.into_iter().for_each(|reply| _ = reply.send(Err(unavailable())));
            }
        }
    }
}
