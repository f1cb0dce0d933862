//! Connections that ended without notice: silent providers and agents, and those of expired gateways.

use std::time::Duration;

use relay_domain::agents::LIVENESS_TTL;
use relay_store::nodes::liveness::DisconnectOutcome;

use super::Nodes;
use crate::{Engine, EngineResult, tick::TickOutcome};

/// A provider without a heartbeat for this long is disconnected. Direct clients send one each 30 s.
const PROVIDER_TTL: Duration = Duration::from_secs(45);
/// The lease (3 s) and the grace must fit into the time for which this worker has itself reached Postgres, with room
/// for gateways to take new leases after an outage.
const GATEWAY_MIN_UPTIME: Duration = Duration::from_secs(12);
/// A gateway's row is kept this long for inspection.
const GATEWAY_ROW_RETENTION: Duration = Duration::from_secs(3600);
const MAX_PER_TICK: i64 = 500;
/// Agents that one step of the silence check passes over.
const MAX_AGENTS_PER_TICK: i64 = 2000;

/// Disconnects silent providers. Postgres must have been up for a whole TTL: before that, silence proves nothing.
pub async fn disconnect_silent(engine: &Engine, storage_up_for: Duration) -> EngineResult<TickOutcome> {
    if storage_up_for < PROVIDER_TTL {
        // A tick that succeeds counts as a contact with Postgres, so it must have made one.
        engine.check_storage().await?;
        return Ok(TickOutcome::default());
    }
    let disconnected = engine.store().disconnect_silent_providers(PROVIDER_TTL, MAX_PER_TICK, engine.now()).await?;
    Ok(engine.nodes().announce_disconnected(disconnected, "liveness_timeout"))
}

/// Marks agents offline that were silent for too long (docs/protocol/rest.md, "Agents"). Postgres must have been up for
/// all that time.
pub async fn mark_silent_offline(engine: &Engine, storage_up_for: Duration) -> EngineResult<TickOutcome> {
    if storage_up_for < LIVENESS_TTL {
        engine.check_storage().await?;
        return Ok(TickOutcome::default());
    }
    let silent = engine.store().mark_silent_agents(LIVENESS_TTL, MAX_AGENTS_PER_TICK, engine.now()).await?;
    silent.recorded.into_iter().for_each(|recorded| engine.core().announce(recorded));
    Ok(TickOutcome { worked: silent.agents, more: silent.more, lag: None })
}

/// Disconnects the providers of gateways with an expired lease, and removes old gateway rows.
pub async fn disconnect_expired_gateways(engine: &Engine, storage_up_for: Duration) -> EngineResult<TickOutcome> {
    if storage_up_for < GATEWAY_MIN_UPTIME {
        engine.check_storage().await?;
        return Ok(TickOutcome::default());
    }
    let disconnected = engine.store().disconnect_orphaned_providers(MAX_PER_TICK, engine.now()).await?;
    // After the disconnect: a gateway with a provider keeps its row.
    engine.store().remove_expired_gateways(GATEWAY_ROW_RETENTION).await?;
    Ok(engine.nodes().announce_disconnected(disconnected, "disconnected"))
}

impl Nodes {
    /// Makes gateways close such sockets, and announces that agents and nodes went offline.
    fn announce_disconnected(&self, disconnected: DisconnectOutcome, reason: &'static str) -> TickOutcome {
        for provider in &disconnected.providers {
            tracing::info!(
                node.id = %provider.node_id,
                node.provider = %provider.provider,
                gateway.id = %provider.gateway_id,
                node.offline = provider.node_is_offline,
                reason,
                "a provider was disconnected"
            );
            // The disconnect raised the epoch, so a gateway that is alive after all closes the socket.
            self.core.hints.provider_taken(
                provider.scope,
                provider.node_id.clone(),
                &provider.provider,
                provider.epoch,
            );
            self.core.hints.node_changed(provider.scope, provider.node_id.clone());
        }
        let worked = disconnected.providers.len() as u64;
        disconnected.recorded.into_iter().for_each(|recorded| self.core.announce(recorded));
        TickOutcome { worked, more: i64::try_from(worked).is_ok_and(|worked| worked >= MAX_PER_TICK), lag: None }
    }
}
