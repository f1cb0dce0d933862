//! Connections that are over although nobody said so: silent providers and agents, and those of dead
//! gateways.

use std::time::Duration;

use relay_domain::agent::LIVENESS_TTL;
use relay_store::liveness::Disconnected;

use super::Ticked;
use crate::{Engine, EngineResult};

/// A provider not heard of for this long is gone. Direct clients heartbeat each 30 s.
const PROVIDER_TTL: Duration = Duration::from_secs(45);
/// How long after its lease ended a gateway's sockets are given up.
const GATEWAY_GRACE: Duration = Duration::from_secs(5);
/// A lease (3 s) and the grace must fit into what this worker has itself seen of Postgres, with room for
/// gateways to take new leases after an outage.
const GATEWAYS_JUDGED_AFTER: Duration = Duration::from_secs(12);
/// A gateway's row is kept this long for people who look at it afterwards.
const GATEWAY_ROW_KEPT: Duration = Duration::from_secs(3600);
/// Providers that one transaction disconnects.
const PER_TICK: i64 = 500;
/// Agents that one step of the look at silence passes over.
const AGENTS_PER_TICK: i64 = 2000;

/// Disconnects providers that went silent. Postgres must have been up for a whole TTL: before that,
/// silence proves nothing.
pub(super) async fn silent_providers(engine: &Engine, storage_up_for: Duration) -> EngineResult<Ticked> {
    if storage_up_for < PROVIDER_TTL {
        engine.check_storage().await?;
        return Ok(Ticked::default());
    }
    let gone = engine.store().disconnect_silent_providers(PROVIDER_TTL, PER_TICK, engine.now()).await?;
    Ok(engine.announce_disconnected(gone, "liveness_timeout"))
}

/// Marks agents offline that were silent for longer than the contract allows. Postgres must have been up all
/// the while.
pub(super) async fn silent_agents(engine: &Engine, storage_up_for: Duration) -> EngineResult<Ticked> {
    if storage_up_for < LIVENESS_TTL {
        engine.check_storage().await?;
        return Ok(Ticked::default());
    }
    let gone = engine.store().mark_silent_agents(LIVENESS_TTL, AGENTS_PER_TICK, engine.now()).await?;
    gone.recorded.into_iter().for_each(|recorded| engine.announce(recorded));
    Ok(Ticked { worked: gone.agents, more: gone.more, lag: None })
}

/// Disconnects the providers of gateways whose lease is gone, and forgets old gateway rows.
pub(super) async fn dead_gateways(engine: &Engine, storage_up_for: Duration) -> EngineResult<Ticked> {
    if storage_up_for < GATEWAYS_JUDGED_AFTER {
        engine.check_storage().await?;
        return Ok(Ticked::default());
    }
    let gone = engine.store().disconnect_orphaned_providers(GATEWAY_GRACE, PER_TICK, engine.now()).await?;
    engine.store().remove_dead_gateways(GATEWAY_ROW_KEPT).await?;
    Ok(engine.announce_disconnected(gone, "disconnected"))
}

impl Engine {
    /// Tells whoever still holds such a socket to close it, and everybody that agents and nodes went offline.
    fn announce_disconnected(&self, gone: Disconnected, reason: &'static str) -> Ticked {
        for provider in &gone.providers {
            tracing::info!(
                node.id = %provider.node_id,
                node.provider = %provider.provider,
                gateway.id = %provider.gateway_id,
                node.offline = provider.node_is_offline,
                reason,
                "a provider was disconnected"
            );
            self.hints().provider_taken(provider.scope, provider.node_id.clone(), &provider.provider, provider.epoch);
            self.hints().node_changed(provider.scope, provider.node_id.clone());
        }
        let worked = gone.providers.len() as u64;
        gone.recorded.into_iter().for_each(|recorded| self.announce(recorded));
        Ticked { worked, more: i64::try_from(worked).is_ok_and(|worked| worked >= PER_TICK), lag: None }
    }
}
