//! Node frames as the published clients build them (docs/protocol/node.md, "Frames to the engine").

use serde_json::{Value, json};

/// Builds `node.register` of a direct node (one agent, an SDK).
pub(super) fn register_direct(id: &str, node_id: &str, name: &str) -> Value {
    json!({
        "v": 1, "type": "node.register", "id": id, "node_id": node_id, "name": name,
        "capabilities": [], "max_agents": 1, "tags": ["implicit", "direct", "sdk"], "version": "testkit",
    })
}

/// Builds `node.register` of a broker's provider.
pub(super) fn register_broker(id: &str, node_id: &str, name: &str, instance_id: &str, capabilities: &[&str]) -> Value {
    let capabilities: Vec<Value> =
        capabilities.iter().map(|name| json!({ "name": name, "kind": "capacity" })).collect();
    json!({
        "v": 1, "type": "node.register", "id": id, "node_id": node_id, "name": name,
        "provider": { "name": "broker", "instance_id": instance_id },
        "capabilities": capabilities, "max_agents": 0, "tags": [], "version": "relay-broker/12.4.1",
        "resume_cursor": null,
    })
}

/// Builds `delivery.ack`: no id, the agent by name.
pub(super) fn ack(agent: &str, up_to_seq: u64) -> Value {
    json!({ "v": 1, "type": "delivery.ack", "agent": agent, "up_to_seq": up_to_seq })
}

/// Builds `inventory.sync` with the complete live set.
pub(super) fn inventory(id: &str, agents: &[(&str, &str)]) -> Value {
    let agents: Vec<Value> = agents.iter().map(|(id, name)| json!({ "agent_id": id, "name": name })).collect();
    json!({ "v": 1, "type": "inventory.sync", "id": id, "agents": agents })
}

/// Builds `node.heartbeat` of a direct node or a broker.
pub(super) fn heartbeat(node_id: &str) -> Value {
    json!({
        "v": 1, "type": "node.heartbeat", "node_id": node_id, "load": 0.0, "active_agents": 1,
        "handlers_live": false,
    })
}
