//! Heartbeats of providers, gathered and written together.

use std::time::Duration;

use relay_domain::{ActionId, JsonText, NodeId, ProviderName, WorkspaceScope};
use relay_store::{StoreError, nodes::heartbeats::Heartbeat};
use relay_tasks::newest::NewestValues;

use super::{Nodes, settings::check_broker_name};
use crate::Inner;

/// Time that heartbeats gather before they are written together.
const HEARTBEATS_EVERY: Duration = Duration::from_secs(1);

type ProviderKey = (WorkspaceScope, NodeId, ProviderName);

/// Heartbeats that wait to be written: the newest of each provider, with up to 64 KiB of capabilities as text. Parsed,
/// these would take 80 times as much.
#[derive(Debug)]
pub(crate) struct Heartbeats(NewestValues<ProviderKey, Heartbeat>);

impl Default for Heartbeats {
    fn default() -> Self {
        Self(NewestValues::new("heartbeats", merge))
    }
}

impl Heartbeats {
    fn add(&self, beat: Heartbeat) {
        self.0.add(key_of(&beat), beat);
    }

    /// Returns those of the unwritten heartbeats whose content no later one repeats: clients send capabilities, limits
    /// and names only when they change.
    fn put_back(&self, beats: &[Heartbeat]) {
        let repeats_nothing =
            |beat: &&Heartbeat| beat.capabilities.is_some() || beat.max_agents.is_some() || beat.node_name.is_some();
        self.0.put_back(beats.iter().filter(repeats_nothing).map(|beat| (key_of(beat), beat.clone())));
    }

    fn take(&self) -> Vec<Heartbeat> {
        self.0.take().into_values().collect()
    }
}

fn key_of(beat: &Heartbeat) -> ProviderKey {
    (beat.scope, beat.node_id.clone(), beat.provider.clone())
}

/// Keeps of the earlier heartbeat what the later one leaves out, unless another connection has come between.
fn merge(earlier: &mut Heartbeat, mut later: Heartbeat) {
    // A frame of a superseded connection may arrive after one of its successor.
    if earlier.epoch > later.epoch {
        return;
    }
    if earlier.epoch == later.epoch {
        later.capabilities = later.capabilities.or(earlier.capabilities.take());
        later.max_agents = later.max_agents.or(earlier.max_agents);
        later.version = later.version.or(earlier.version.take());
        later.node_name = later.node_name.or(earlier.node_name.take());
    }
    *earlier = later;
}

/// Writes heartbeats until the engine is dropped.
pub(crate) async fn write_heartbeats(engine: std::sync::Weak<Inner>) {
    // Recorded changes of capabilities that placement does not use yet, and new names of nodes.
    let changed = NewestValues::new("changed_heartbeats", merge);
    loop {
        tokio::time::sleep(HEARTBEATS_EVERY).await;
        // A weak reference: this task must not keep the engine alive.
        let Some(inner) = engine.upgrade() else { return };
        // In parts: a statement stays bounded, and one invalid row slows down at most a thousand heartbeats.
        for some in inner.nodes.heartbeats.take().chunks(1000) {
            record(&inner, some, &changed).await;
        }
        for (key, beat) in changed.take() {
            if let Err(error) = apply_changes(&inner, &beat).await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "changes of a heartbeat not applied, will retry"
                );
                changed.put_back([(key, beat)]);
            }
        }
    }
}

/// Records heartbeats, and adds those with changed capabilities or another name of their node to `changed`.
async fn record(inner: &Inner, beats: &[Heartbeat], changed: &NewestValues<ProviderKey, Heartbeat>) {
    match inner.core.store.record_heartbeats(beats).await {
        Ok(newly) => {
            // A heartbeat in both groups becomes one entry: the queue merges by provider.
            for beat in newly.into_iter().chain(beats.iter().filter(|beat| beat.node_name.is_some())) {
                changed.add(key_of(beat), beat.clone());
            }
        }
        Err(error) if !is_permanent(&error) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to record heartbeats, will retry");
            inner.nodes.heartbeats.put_back(beats);
        }
        // One of them is at fault: written alone, it delays no other.
        Err(_) if beats.len() > 1 => {
            for one in beats.chunks(1) {
                Box::pin(record(inner, one, changed)).await;
            }
        }
        Err(error) => {
            let nodes: Vec<_> = beats.iter().map(|beat| beat.node_id.as_str()).collect();
            tracing::warn!(node.id = ?nodes, error = &error as &dyn std::error::Error, "heartbeat refused by storage");
        }
    }
}

/// Returns whether a repetition would fail as well.
const fn is_permanent(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { .. } | StoreError::Corrupt { .. })
}

/// Applies the changes that a heartbeat declares.
///
/// # Errors
/// When a repetition may succeed.
async fn apply_changes(inner: &Inner, beat: &Heartbeat) -> Result<(), StoreError> {
    match inner.core.store.rename_node(beat).await {
        Ok(true) => {}
        Ok(false) => tracing::info!(node.id = %beat.node_id, "node keeps its name: another one has the new name"),
        Err(error) if is_permanent(&error) => {
            tracing::warn!(node.id = %beat.node_id, error = &error as &dyn std::error::Error, "name of a heartbeat not stored");
        }
        Err(error) => return Err(error),
    }
    refresh_capabilities(inner, beat).await
}

/// Stores the capabilities of a heartbeat; placement uses them from now on.
///
/// # Errors
/// When a repetition may succeed.
async fn refresh_capabilities(inner: &Inner, beat: &Heartbeat) -> Result<(), StoreError> {
    let Some(capabilities) = beat.capabilities.as_ref().map(JsonText::to_value) else { return Ok(()) };
    let count = capabilities.as_array().map_or(0, Vec::len);
    // Ids are taken before the transaction. Those of known actions are not used.
    let ids: Vec<ActionId> = (0..count).map(|_| ActionId::new(inner.core.ids.next_id())).collect();
    match inner.core.store.refresh_capabilities(beat, &capabilities, &ids, inner.core.now()).await {
        Ok(true) => Ok(()),
        Ok(false) => {
            tracing::info!(node.id = %beat.node_id, "capabilities of a heartbeat refused: another handler has the action name");
            Ok(())
        }
        Err(error) if is_permanent(&error) => {
            tracing::warn!(node.id = %beat.node_id, error = &error as &dyn std::error::Error, "capabilities of a heartbeat not stored");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

impl Nodes {
    /// Records a heartbeat: written within a second, newest of each provider. A name that no node may have is ignored:
    /// the node keeps its own.
    pub fn record_heartbeat(&self, mut beat: Heartbeat) {
        // Not an error: the rest of the heartbeat must still prove that the provider lives.
        beat.node_name = beat.node_name.and_then(|name| check_broker_name(&name).map(str::to_owned).ok());
        self.heartbeats.add(beat);
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;
    use serde_json::json;

    use super::*;

    fn beat(epoch: i64, load: f64, capabilities: Option<&str>) -> Heartbeat {
        Heartbeat {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            node_id: NodeId::new("n"),
            provider: ProviderName::new("p"),
            epoch,
            load,
            load_measured: true,
            active_agents: 0,
            handlers_live: true,
            max_agents: None,
            version: None,
            node_name: None,
            capabilities: capabilities.map(|name| json!([{ "name": name }]).into()),
        }
    }

    fn written(beats: &Heartbeats) -> Vec<(i64, f64, Option<String>)> {
        let name = |beat: &Heartbeat| beat.capabilities.as_ref().map(|list| list.to_value()[0]["name"].to_string());
        beats.take().iter().map(|beat| (beat.epoch, beat.load, name(beat))).collect()
    }

    #[test]
    fn capabilities_survive_later_heartbeats_and_failed_writes() {
        let beats = Heartbeats::default();
        beats.add(beat(1, 0.1, Some("build")));
        beats.add(beat(1, 0.2, None));
        let unwritten = beats.take();
        beats.add(beat(1, 0.3, None));
        beats.put_back(&unwritten);
        assert_eq!(written(&beats), [(1, 0.3, Some("\"build\"".to_owned()))]);
    }

    #[test]
    fn a_heartbeat_of_an_older_connection_adds_nothing() {
        let beats = Heartbeats::default();
        beats.add(beat(2, 0.2, None));
        beats.put_back(&[beat(1, 0.1, Some("build"))]);
        assert_eq!(written(&beats), [(2, 0.2, None)]);
    }
}
