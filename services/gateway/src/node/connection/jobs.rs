//! Jobs of a connection: work that waits for storage, beside the socket.
//!
//! Reads are repeated until storage answers. A job ends with its connection, which bounds the repetitions.

use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use relay_domain::{AgentId, mailboxes::stream::Seq};
use relay_engine::{
    Engine, EngineError, EngineResult,
    access::callers::NodeCaller,
    mailboxes::serving::{Fence, MailboxPosition, RepairRequest, RepairedMailbox},
};
use tokio::time::Instant;

use super::{
    control::{Outcome, Request},
    hosting::StartMode,
};

/// Delay between attempts while storage is unavailable.
const STORAGE_RETRY: Duration = Duration::from_millis(500);
/// Delay between attempts to verify a position, for which a broker waits.
const VERIFY_RETRY: Duration = Duration::from_millis(200);
/// Interval at which a delayed ack is looked up in storage; a floor is usually stored within it.
const ACK_STORE_POLL_INTERVAL: Duration = Duration::from_millis(40);
/// Attempts to record a disconnect: about five seconds, the duration of a Postgres restart.
const DISCONNECT_ATTEMPTS: u32 = 10;

/// Work that the connection starts.
pub(super) enum Job {
    /// Request of the node; one at a time.
    Request(Request),
    /// Action result of the node; many at a time.
    Result(Request),
    Read(Read),
}

/// Work that changes no state of the node.
pub(super) enum Read {
    /// Reads the positions of mailboxes that the connection will serve.
    Serve { target: ServeTarget, start: StartMode },
    /// Reads which agents are located on the provider.
    Relist(Fence),
    /// Reads the missing rows of mailboxes.
    Repair(Vec<RepairRequest>),
    /// Verifies the position of a broker above what was sent to it.
    VerifyPosition { fence: Fence, agent: AgentId, reported: Seq },
    /// Waits until a floor that was written asynchronously is visible.
    StoredAck { agent: AgentId, floor: Seq },
}

/// Agents to serve.
pub(super) enum ServeTarget {
    Agents(Vec<AgentId>),
    /// All agents located on the provider. Without inventories they are online as soon as the provider is.
    Provider {
        fence: Fence,
        online: bool,
    },
}

/// Outcome of a job.
pub(super) enum JobResult {
    Request(Box<Outcome>),
    /// Reply to an action result, if it has one.
    Result(Option<Utf8Bytes>),
    /// Positions of the agents, and how their streams start.
    Serve {
        start: StartMode,
        agents: Vec<MailboxPosition>,
    },
    /// Agents located on this provider, read at or after `asked`.
    Relisted {
        asked: Instant,
        positions: Vec<MailboxPosition>,
    },
    Repaired(EngineResult<Vec<RepairedMailbox>>),
    /// Position of a mailbox whose broker reported a seq above its head.
    PositionVerified {
        agent: AgentId,
        reported: Seq,
        position: Option<MailboxPosition>,
    },
    /// A delayed ack is visible in storage.
    AckStored {
        agent: AgentId,
        floor: Seq,
    },
}

/// Runs a read of a connection of `node`.
pub(super) async fn read(engine: Engine, node: NodeCaller, read: Read) -> JobResult {
    match read {
        Read::Serve { target, start } => {
            let agents = retry(STORAGE_RETRY, || read_positions(&engine, &node, &target)).await;
            JobResult::Serve { start, agents }
        }
        Read::Relist(fence) => {
            let located = || async {
                // For each attempt: after an outage, agents that were adopted during it must not seem to be missing.
                let asked = Instant::now();
                let positions =
                    engine.mailboxes().positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await?;
                Ok((asked, positions))
            };
            let (asked, positions) = retry(STORAGE_RETRY, located).await;
            JobResult::Relisted { asked, positions }
        }
        Read::Repair(requests) => {
            let repaired = engine.mailboxes().read_missing(node.scope, &requests).await;
            if let Err(error) = &repaired {
                tracing::debug!(error = error as &dyn std::error::Error, "repair failed, retrying");
            }
            JobResult::Repaired(repaired)
        }
        Read::VerifyPosition { fence, agent, reported } => {
            let verify = || async {
                // What an earlier socket of this gateway has sent counts.
                engine.mailboxes().flush_cursors().await?;
                engine.recovery().accept_broker_position(&fence, agent, reported).await
            };
            let position = retry(VERIFY_RETRY, verify).await;
            JobResult::PositionVerified { agent, reported, position }
        }
        Read::StoredAck { agent, floor } => {
            wait_until_ack_stored(&engine, &node, agent, floor).await;
            JobResult::AckStored { agent, floor }
        }
    }
}

/// Repeats a read until it succeeds.
async fn retry<T, F>(pause: Duration, attempt: impl Fn() -> F) -> T
where
    F: Future<Output = EngineResult<T>>,
{
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => wait_for_storage(pause, &error).await,
        }
    }
}

async fn wait_for_storage(pause: Duration, error: &EngineError) {
    tracing::debug!(error = error as &dyn std::error::Error, "storage unavailable, retrying");
    tokio::time::sleep(pause).await;
}

async fn read_positions(
    engine: &Engine,
    node: &NodeCaller,
    target: &ServeTarget,
) -> EngineResult<Vec<MailboxPosition>> {
    match target {
        ServeTarget::Agents(agents) => {
            let keys: Vec<_> = agents.iter().map(|agent| (node.scope, *agent)).collect();
            engine.mailboxes().positions(&keys).await
        }
        ServeTarget::Provider { fence, online: true } if node.is_direct() => {
            engine.nodes().bring_direct_online(fence).await
        }
        ServeTarget::Provider { fence, online: true } => engine.nodes().bring_broker_online(fence).await,
        ServeTarget::Provider { fence, online: false } => {
            engine.mailboxes().positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await
        }
    }
}

async fn wait_until_ack_stored(engine: &Engine, node: &NodeCaller, agent: AgentId, floor: Seq) {
    loop {
        tokio::time::sleep(ACK_STORE_POLL_INTERVAL).await;
        match engine.mailboxes().positions(&[(node.scope, agent)]).await.as_deref() {
            // An agent that moved to another node sends no more acks here.
            Ok([position]) if position.ack_floor < floor && position.node_id == node.node_id => {}
            // Stored. A deleted agent has no position, and its ack is never stored.
            Ok(_) => return,
            Err(error) => {
                tracing::debug!(error = error as &dyn std::error::Error, "delayed ack not verified, retrying")
            }
        }
    }
}

/// Records that a connection has ended. Retries for a few seconds; after that the worker finds the expired connection
/// half a minute later.
pub(super) async fn disconnect_provider(engine: &Engine, fence: &Fence) {
    for _ in 0..DISCONNECT_ATTEMPTS {
        match engine.nodes().disconnect_provider(fence).await {
            Ok(_) => return,
            Err(error) => wait_for_storage(STORAGE_RETRY, &error).await,
        }
    }
}
