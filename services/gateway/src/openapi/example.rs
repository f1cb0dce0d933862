//! Examples, put together from the schemas, so that none can go stale.

use serde_json::{Map, Value, json};

/// Examples of fields whose schema has none, by the field's name.
const EXAMPLES_BY_FIELD: &[(&str, &str)] = &[
    ("action_name", "build"),
    ("after", "243812100000000001"),
    ("agent", "bob"),
    ("agent_id", "243812050000000000"),
    ("agent_name", "ada"),
    ("answer", "busy"),
    ("api_key", "rk_live_0f4e8a1c5b7d92360f4e8a1c5b7d9236"),
    ("api_key_hash", ""),
    ("attachment", "243812200000000001"),
    ("author", "deploys"),
    ("available_to", "ada"),
    ("before", "243812100000000009"),
    ("caller_id", "243812050000000000"),
    ("caller_name", "ada"),
    ("capability", "spawn:claude"),
    ("channel", "general"),
    ("channel_id", "243812004871278600"),
    ("channel_name", "general"),
    ("content_type", "text/plain"),
    ("conversation", "dm_5f0c1a9be7d24c3688aa01f2"),
    ("conversation_id", "dm_5f0c1a9be7d24c3688aa01f2"),
    ("created_at", "2026-03-01T12:00:00.000Z"),
    ("created_by", "243812050000000000"),
    ("delivery_adapter", "ws.node.v1"),
    ("description", "Builds and tests"),
    ("dispatched_node_id", "node_243812600000000001"),
    ("emoji", "thumbsup"),
    ("error", "the tool crashed"),
    ("event", "message.created"),
    ("event_type", "message.created"),
    ("file_id", "243812200000000001"),
    ("filename", "report.pdf"),
    ("from", "bob"),
    ("from_agent_id", "243812050000000000"),
    ("handle", "@ada"),
    ("handler_agent", "bob"),
    ("handler_node", "build-box"),
    ("handler_node_id", "node_243812600000000001"),
    ("machine_id", "machine-7"),
    ("member", "ada"),
    ("mention", "bob"),
    ("message_id", "243812100000000001"),
    ("node_id", "node_243812600000000001"),
    ("node_name", "build-box"),
    ("origin_actor", "ci"),
    ("origin_distinct_id", "d-17"),
    ("origin_id", "run-17"),
    ("participant", "bob"),
    ("persona", "Looks after the build"),
    ("prompt", "Be brief."),
    ("reason", "busy"),
    ("redriven_as", "del_243812100000000001_243812050000000001_r1"),
    ("session_ref", "session-1"),
    ("step", "accepted"),
    ("system_prompt", "Be brief."),
    ("tag", "ci"),
    ("target_node_id", "node_243812600000000001"),
    ("text", "the build is green"),
    ("to", "bob"),
    ("token", "at_live_6b1f0c9d2e8a4753b1f0c9d2e8a47536"),
    ("token_hash", ""),
    ("topic", "General discussion"),
    ("upload_url", "https://relay.example/_relayfiles?token=6b1f0c9d"),
    ("uploaded_by", "ada"),
    ("url", "https://relay.example/hook"),
    ("version", "1.4.0"),
    ("workspace_id", "243812004871278592"),
];

/// Examples of ids and names, by what the name of their schema begins with. The longest beginning counts.
const EXAMPLES_BY_SCHEMA: &[(&str, &str, &str)] = &[
    ("Action", "act_243812004871278592", "build"),
    ("ActivityItem", "243812100000000001", ""),
    ("Agent", "243812050000000000", "ada"),
    ("AnyConversation", "dm_5f0c1a9be7d24c3688aa01f2", "release"),
    ("Attachment", "243812200000000001", "report.pdf"),
    ("BindAgent", "", "bob"),
    ("Binding", "anb_243812050000000001", "bob"),
    ("CapabilityInput", "", "spawn:claude"),
    ("Channel", "243812004871278600", "general"),
    ("ConsoleMessage", "243812100000000001", ""),
    ("Conversation", "dm_5f0c1a9be7d24c3688aa01f2", "release"),
    ("ConversationMessage", "243812100000000001", "ada"),
    ("CreateChannel", "", "general"),
    ("CreateGroup", "", "release"),
    ("CreateObserverToken", "", "dashboard"),
    ("CreateWebhook", "", "deploys"),
    ("CreateWorkspace", "", "first-steps"),
    ("Deliver", "del_243812100000000001_243812050000000001", "bob"),
    ("DeliveredMessage", "243812100000000001", "ada"),
    ("EnrolNode", "node_243812600000000001", "build-box"),
    ("EnrolledNode", "node_243812600000000001", "build-box"),
    ("File", "243812200000000001", "report.pdf"),
    ("Found", "243812100000000001", ""),
    ("Group", "243812700000000001", "release"),
    ("LastMessage", "243812100000000001", "ada"),
    ("Mention", "243812100000000001", ""),
    ("Message", "243812100000000001", "ada"),
    ("Node", "node_243812600000000001", "build-box"),
    ("ObserverToken", "ot_243812500000000001", "dashboard"),
    ("PendingDelivery", "del_243812100000000001_243812050000000001", "bob"),
    ("Reaction", "243812800000000001", ""),
    ("Register", "243812050000000000", "ada"),
    ("RotatedToken", "", "ada"),
    ("Sent", "243812100000000001", "ada"),
    ("ShownCapability", "", "spawn:claude"),
    ("Skill", "rust", "Rust"),
    ("SubscriptionDelivery", "243812900000000001", ""),
    ("UnreadMessage", "243812100000000001", ""),
    ("UpdateAgent", "", "ada"),
    ("UpdateObserverToken", "", "dashboard"),
    ("UpdateWorkspace", "", "first-steps"),
    ("Webhook", "wh_243812300000000001", "deploys"),
    ("Workspace", "243812004871278592", "first-steps"),
];

/// Makes examples of schemas.
pub(super) struct Examples<'a> {
    schemas: &'a Value,
}

impl<'a> Examples<'a> {
    pub(super) fn new(schemas: &'a Value) -> Self {
        Self { schemas }
    }

    /// An example of a schema. `None` where a field has none and its name says nothing.
    pub(super) fn for_schema(&self, schema: &Value) -> Option<Value> {
        self.build_example(schema, "", "")
    }

    /// `owner` is the schema whose field this is, `field` the field's name.
    fn build_example(&self, schema: &Value, owner: &str, field: &str) -> Option<Value> {
        if let Some(given) = schema.get("example").or_else(|| schema.get("examples").and_then(|all| all.get(0))) {
            return Some(given.clone());
        }
        if let Some(name) = schema["$ref"].as_str().and_then(|link| link.rsplit('/').next()) {
            let target = &self.schemas[name];
            // Ids say more by the field that they are in.
            let known = target["type"] == "string" && target["enum"].is_null();
            return known
                .then(|| example_by_name(owner, field))
                .flatten()
                .or_else(|| self.build_example(target, name, field));
        }
        if let Some(word) = schema.get("const").or_else(|| schema.get("enum").and_then(|all| all.get(0))) {
            return Some(word.clone());
        }
        if let Some(parts) = schema.get("allOf").and_then(Value::as_array) {
            let mut whole = Map::new();
            for part in parts {
                if let Value::Object(fields) = self.build_example(part, owner, field)? {
                    whole.extend(fields);
                }
            }
            return Some(Value::Object(whole));
        }
        for kinds in ["oneOf", "anyOf"] {
            if let Some(kinds) = schema.get(kinds).and_then(Value::as_array) {
                let first = kinds.iter().find(|kind| kind["type"] != "null")?;
                return self.build_example(first, owner, field);
            }
        }
        let types = schema["type"].as_array();
        let nullable = types.is_some_and(|types| types.contains(&json!("null")));
        let kind = match types {
            Some(types) => types.iter().filter_map(Value::as_str).find(|kind| *kind != "null"),
            None => schema["type"].as_str(),
        };
        match kind {
            Some("object") => self.build_object(schema, owner),
            Some("array") => {
                let item = self.build_example(schema.get("items")?, owner, &singular(field))?;
                Some(json!([item]))
            }
            Some("string") if schema["format"] == "date-time" => Some(json!("2026-03-01T12:00:00.000Z")),
            Some("string") => example_by_name(owner, field).or(nullable.then_some(Value::Null)),
            Some("integer" | "number") => Some(schema.get("minimum").cloned().unwrap_or(json!(1))),
            Some("boolean") => Some(json!(false)),
            // Anything goes.
            _ => Some(Value::Null),
        }
    }

    fn build_object(&self, schema: &Value, owner: &str) -> Option<Value> {
        let mut object = Map::new();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            object.insert(name.clone(), self.build_example(field, owner, name)?);
        }
        Some(Value::Object(object))
    }
}

fn example_by_name(owner: &str, field: &str) -> Option<Value> {
    if matches!(field, "id" | "name") {
        let (_, id, name) = EXAMPLES_BY_SCHEMA
            .iter()
            .filter(|(start, ..)| owner.starts_with(start))
            .max_by_key(|(start, ..)| start.len())?;
        return Some(json!(if field == "id" { id } else { name })).filter(|text| text != "");
    }
    EXAMPLES_BY_FIELD.iter().find(|(name, _)| *name == field).map(|(_, example)| json!(example))
}

/// Returns the singular of a list's name.
fn singular(field: &str) -> String {
    match field.strip_suffix("ies") {
        Some(stem) => format!("{stem}y"),
        None => field.strip_suffix('s').unwrap_or(field).to_owned(),
    }
}
