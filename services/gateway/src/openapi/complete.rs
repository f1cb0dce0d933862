//! Completes the OpenAPI document with parts that all operations share, so that handlers need not repeat them: path
//! parameters, common errors, envelopes, examples. Called by `document`.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::example::Examples;

/// Descriptions and examples of path parameters, by the segment before them.
const PARAMETERS: &[(&str, &str, &str)] = &[
    ("by-name", "A workspace's name.", "first-steps"),
    ("workspaces", "A workspace.", "243812004871278592"),
    ("agents", "An agent's name.", "ada"),
    ("channels", "A channel's name. One leading `#` is dropped.", "general"),
    ("messages", "A message.", "243812100000000001"),
    ("reactions", "An emoji: a short code or the character itself.", "thumbsup"),
    ("dm", "A conversation.", "dm_5f0c1a9be7d24c3688aa01f2"),
    ("conversations", "A conversation.", "dm_5f0c1a9be7d24c3688aa01f2"),
    ("participants", "An agent's name.", "bob"),
    ("deliveries", "A delivery.", "del_243812100000000001_243812050000000001"),
    ("nodes", "A node's name.", "build-box"),
    ("providers", "The name of a provider of the node.", "broker"),
    ("files", "A file.", "243812200000000001"),
    ("webhooks", "An inbound webhook.", "wh_243812300000000001"),
    ("hooks", "An inbound webhook.", "wh_243812300000000001"),
    ("subscriptions", "An event subscription.", "sub_243812400000000001"),
    ("dead-letters", "A dead letter, by the id of its delivery.", "del_243812100000000001_243812050000000001"),
    ("redrives", "A redrive by filter.", "243812600000000001"),
    ("actions", "An action's name.", "build"),
    ("invocations", "An invocation.", "inv_243812004871278592"),
    ("triggers", "A trigger.", "trg_243812400000000001"),
    ("console", "A file of the page.", "app.js"),
    ("signing-keys", "A signing key.", "3f2c9a1be07d4c58"),
    ("observer-tokens", "An observer token.", "ot_243812500000000001"),
    ("sessions", "The reference of a session.", "session-1"),
    ("to", "An agent's address or name.", "ada@build-box"),
];

/// Completes the document.
pub(super) fn complete_document(document: &mut Value, tags: &[(&str, &str)]) {
    let tags = tags.iter().map(|(name, description)| json!({ "name": name, "description": description }));
    document["tags"] = tags.collect();
    require_nullable_response_fields(document);
    let (mut paths, mut refusals) = (document["paths"].take(), Map::new());
    let examples = Examples::new(&document["components"]["schemas"]);
    for (path, methods) in paths.as_object_mut().into_iter().flatten() {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            qualify_operation_id(operation);
            add_path_parameters(path, operation);
            add_common_refusals(operation);
            add_response_headers(method, operation);
            let is_paged = has_parameter(operation, "cursor");
            for (status, response) in operation["responses"].as_object_mut().into_iter().flatten() {
                if status.as_str() >= "400" {
                    describe_refusal(status, response, &mut refusals);
                } else {
                    describe_success(status, response);
                    if !matches!(path.as_str(), "/health" | "/openapi.json") {
                        wrap_in_envelope(status, response, is_paged);
                    }
                }
            }
            add_examples(operation, &examples);
        }
    }
    document["paths"] = paths;
    refusals.sort_keys();
    document["components"]["responses"] = Value::Object(refusals);
}

/// Prefixes the operation id with the tag, because handlers of several modules are called `create`.
fn qualify_operation_id(operation: &mut Value) {
    let (tag, name) = (operation["tags"][0].as_str().unwrap_or_default(), operation["operationId"].as_str());
    operation["operationId"] = json!(format!("{}_{}", tag.replace(' ', "_"), name.unwrap_or_default()));
}

fn add_path_parameters(path: &str, operation: &mut Value) {
    let mut found = Vec::new();
    let mut before = "";
    for segment in path.split('/') {
        if let Some(name) = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            // A test finds parameters without a description.
            let known = PARAMETERS.iter().find(|(noun, ..)| *noun == before);
            let (description, example) = known.map_or(("", ""), |(_, description, example)| (*description, *example));
            found.push(json!({
                "name": name, "in": "path", "required": true, "description": description,
                "schema": { "type": "string", "minLength": 1 }, "example": example,
            }));
        } else {
            before = segment;
        }
    }
    let mut rest = operation.get_mut("parameters").map(Value::take).unwrap_or_default();
    for mut parameter in rest.as_array_mut().into_iter().flatten().map(Value::take) {
        // Optional query and header parameters cannot be null.
        if let Some(kind) = parameter["schema"]["type"].as_array().and_then(|kinds| kinds.first()).cloned() {
            parameter["schema"]["type"] = kind;
        }
        found.push(parameter);
    }
    if !found.is_empty() {
        operation["parameters"] = Value::Array(found);
    }
}

/// Adds the errors of `extract`, `caller`, `middleware` and of an unavailable engine.
fn add_common_refusals(operation: &mut Value) {
    let mut add = Vec::new();
    add.push(("400", "invalid_request"));
    if operation["requestBody"]["content"].get("application/json").is_some() {
        add.extend([("400", "invalid_json"), ("413", "payload_too_large"), ("415", "unsupported_media_type")]);
    }
    if has_parameter(operation, IDEMPOTENCY_KEY) {
        add.extend([
            ("400", "invalid_idempotency_key"),
            ("409", "idempotency_key_reused"),
            ("409", "idempotency_in_progress"),
        ]);
    }
    let schemes: BTreeSet<String> = operation["security"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_object)
        .flat_map(Map::keys)
        .cloned()
        .collect();
    if !schemes.is_empty() {
        add.extend([("401", "unauthorized"), ("429", "rate_limit_exceeded")]);
        if !schemes.contains("operator") {
            add.push(("423", "workspace_suspended"));
        }
        if schemes.contains("webhook_token") {
            add.push(("401", "webhook_token_required"));
        }
        for (scheme, invalid, forbidden) in [
            ("agent_token", "agent_token_invalid", None),
            ("node_token", "node_token_invalid", Some("node_token_forbidden")),
            ("observer_token", "observer_token_invalid", Some("observer_token_forbidden")),
            ("webhook_token", "webhook_token_invalid", None),
        ] {
            let code = if schemes.contains(scheme) { Some(invalid) } else { forbidden };
            add.extend(code.map(|code| ("401", code)));
        }
    }
    if schemes.contains("observer_token") {
        add.push(("403", "insufficient_scope"));
    }
    add.extend([
        ("500", "internal_error"),
        ("503", "database_overloaded"),
        ("503", "workspace_busy"),
        ("503", "request_timeout"),
    ]);
    for (status, code) in add {
        let response = &mut operation["responses"][status];
        let codes = response["description"].as_str().unwrap_or_default();
        if response["content"].is_null() && !codes.split(", ").any(|known| known == code) {
            let codes = if codes.is_empty() { code.to_owned() } else { format!("{codes}, {code}") };
            response["description"] = json!(codes);
        }
    }
    if let Some(responses) = operation["responses"].as_object_mut() {
        responses.sort_keys();
    }
}

const IDEMPOTENCY_KEY: &str = "Idempotency-Key";

fn has_parameter(operation: &Value, name: &str) -> bool {
    operation["parameters"].as_array().is_some_and(|all| all.iter().any(|one| one["name"] == name))
}

fn add_response_headers(method: &str, operation: &mut Value) {
    let keyed = has_parameter(operation, IDEMPOTENCY_KEY);
    for (status, response) in operation["responses"].as_object_mut().into_iter().flatten() {
        if keyed && status.starts_with('2') && method == "post" {
            response["headers"]["Idempotency-Replayed"] = json!({
                "description": "`true` if the response repeats an earlier one.", "schema": { "type": "string", "const": "true" },
            });
        }
        if status == "503" || status == "429" {
            response["headers"]["Retry-After"] = json!({
                "description": "Delay before a retry, in seconds.", "schema": { "type": "string", "pattern": "^[0-9]+$" },
            });
        }
    }
}

/// Derives schema and example of an error from the codes in its description. Equal lists of one status are written
/// once.
fn describe_refusal(status: &str, response: &mut Value, known: &mut Map<String, Value>) {
    if !response["content"].is_null() {
        return;
    }
    let description = response["description"].as_str().unwrap_or_default().to_owned();
    let codes: Vec<&str> = description.split(", ").collect();
    let shown: Vec<String> = codes.iter().map(|code| format!("`{code}`")).collect();
    response["description"] = json!(shown.join(", "));
    response["content"]["application/json"] = json!({
        "schema": { "allOf": [
            { "$ref": "#/components/schemas/Failure" },
            { "properties": { "error": { "properties": { "code": { "enum": codes } } } } },
        ] },
        "example": { "ok": false, "error": { "code": codes[0], "message": "What exactly is wrong" } },
    });
    let name = format!("{status}-{}", codes.join("-"));
    let link = json!({ "$ref": format!("#/components/responses/{name}") });
    known.insert(name, std::mem::replace(response, link));
}

/// Wraps a response body in `{"ok":true,"data":…}`, with the cursor of paged lists.
fn wrap_in_envelope(status: &str, response: &mut Value, with_cursor: bool) {
    if response["content"].is_null() && matches!(status, "200" | "201") {
        response["content"]["application/json"]["schema"] = json!({ "type": "null" });
    }
    let Some(content) = response.get_mut("content").and_then(|content| content.get_mut("application/json")) else {
        return;
    };
    let data = content["schema"].take();
    content["schema"] = json!({
        "type": "object", "required": ["ok", "data"], "properties": { "ok": { "const": true }, "data": data },
    });
    if with_cursor {
        content["schema"]["properties"]["cursor"] = json!({
            "type": "object", "required": ["next", "has_more"], "description": "Cursor of the next page.",
            "properties": {
                "next": { "type": ["string", "null"], "example": "eyJhdCI6MX0" }, "has_more": { "type": "boolean" },
            },
        });
    }
}

fn describe_success(status: &str, response: &mut Value) {
    if response["description"].as_str().unwrap_or_default().is_empty() {
        response["description"] = json!(match status {
            "101" => "The protocol is switched",
            "201" => "Created",
            "204" => "Success without a body",
            _ => "Success",
        });
    }
}

fn add_examples(operation: &mut Value, examples: &Examples<'_>) {
    let show_in = |content: &mut Value| {
        if let Some(json) = content.get_mut("application/json")
            && json.get("example").is_none()
            && let Some(example) = examples.for_schema(&json["schema"])
        {
            json["example"] = example;
        }
    };
    if let Some(body) = operation.get_mut("requestBody") {
        show_in(&mut body["content"]);
    }
    for response in operation["responses"].as_object_mut().into_iter().flat_map(Map::values_mut) {
        if let Some(content) = response.get_mut("content") {
            show_in(content);
        }
    }
}

/// Marks nullable fields of responses as required: responses contain them as null, request bodies may omit them, and
/// the derived schemas do not distinguish the two.
fn require_nullable_response_fields(document: &mut Value) {
    let (mut asked, mut answered) = (BTreeSet::new(), BTreeSet::new());
    let operations = document["paths"].as_object().into_iter().flat_map(Map::values).filter_map(Value::as_object);
    for operation in operations.flat_map(Map::values) {
        collect_schema_names(&operation["requestBody"], document, &mut asked);
        collect_schema_names(&operation["responses"], document, &mut answered);
    }
    for name in answered.difference(&asked) {
        require_nullable(&mut document["components"]["schemas"][name.as_str()]);
    }
}

/// Collects the names of all schemas that a part of the document refers to.
fn collect_schema_names(part: &Value, document: &Value, names: &mut BTreeSet<String>) {
    match part {
        Value::Object(object) => {
            let name = object.get("$ref").and_then(Value::as_str).and_then(|link| link.rsplit('/').next());
            if let Some(name) = name
                && names.insert(name.to_owned())
            {
                collect_schema_names(&document["components"]["schemas"][name], document, names);
            }
            object.values().for_each(|part| collect_schema_names(part, document, names));
        }
        Value::Array(list) => list.iter().for_each(|part| collect_schema_names(part, document, names)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn require_nullable(schema: &mut Value) {
    for part in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
        require_nullable(part);
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    let mut required: Vec<Value> = schema["required"].as_array().cloned().unwrap_or_default();
    for (name, property) in properties {
        if may_be_null(property) && !required.contains(&json!(name)) {
            required.push(json!(name));
        }
    }
    if !required.is_empty() {
        schema["required"] = Value::Array(required);
    }
}

fn may_be_null(schema: &Value) -> bool {
    let of_a_kind = |key: &str| schema[key].as_array().is_some_and(|all| all.iter().any(|one| one["type"] == "null"));
    let any = ["type", "$ref", "oneOf", "anyOf", "allOf", "enum"].iter().all(|key| schema.get(key).is_none());
    any || of_a_kind("oneOf")
        || of_a_kind("anyOf")
        || schema["type"].as_array().is_some_and(|types| types.contains(&json!("null")))
}
