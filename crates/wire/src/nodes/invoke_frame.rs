//! `action.invoke` frame (docs/protocol/node.md, "action.invoke"), encoded by the engine. Strict clients drop a frame
//! with an unknown key. A node reads it as [`super::engine_frame::ActionInvoke`].

use relay_domain::{AgentId, InvocationId};
use serde::Serialize;

#[derive(Serialize)]
struct Invoke<'a, I> {
    v: u8,
    #[serde(rename = "type")]
    kind: &'static str,
    invocation_id: InvocationId,
    action: &'a str,
    input: &'a I,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_id: Option<AgentId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller_name: Option<&'a str>,
}

/// Encodes the frame. `agent` is the handler on its node; `caller` is included for handlers that asked for it.
#[must_use]
pub fn invoke_frame(
    id: InvocationId,
    action: &str,
    input: &impl Serialize,
    agent: Option<&(AgentId, String)>,
    caller: Option<&(Option<AgentId>, String)>,
) -> String {
    let frame = Invoke {
        v: 1,
        kind: "action.invoke",
        invocation_id: id,
        action,
        input,
        agent_id: agent.map(|(id, _)| *id),
        agent_name: agent.map(|(_, name)| name.as_str()),
        caller_id: caller.map(|(id, name)| id.map_or_else(|| name.clone(), |id| id.to_string())),
        caller_name: caller.map(|(_, name)| name.as_str()),
    };
    // Strings, numbers and JSON values always encode.
    serde_json::to_string(&frame).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn optional_fields_are_left_out() {
        let plain = invoke_frame(InvocationId::new(7), "build", &json!({ "ref": "main" }), None, None);
        assert_eq!(
            plain,
            r#"{"v":1,"type":"action.invoke","invocation_id":"inv_7","action":"build","input":{"ref":"main"}}"#
        );
        let agent = (AgentId::new(3), "ann".to_owned());
        let caller = (None, "workspace".to_owned());
        let full: Value =
            serde_json::from_str(&invoke_frame(InvocationId::new(7), "a", &json!({}), Some(&agent), Some(&caller)))
                .unwrap();
        assert_eq!((&full["agent_id"], &full["agent_name"]), (&json!("3"), &json!("ann")));
        assert_eq!((&full["caller_id"], &full["caller_name"]), (&json!("workspace"), &json!("workspace")));
    }
}
