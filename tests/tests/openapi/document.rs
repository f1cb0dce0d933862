//! The OpenAPI document compared with the router, with itself, and with the file in `docs/`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::access::{Class, ROUTES};
use relay_acceptance::raw::Raw;
use relay_acceptance::routes::{anonymize_path, gateway_routes};
use relay_testkit::shared;
use serde_json::Value;

async fn document() -> Result<Value> {
    let base = shared().await.any_gateway();
    let reply = Raw::new("GET", format!("{base}/openapi.json")).send().await?;
    ensure!(reply.status == 200 && reply.headers["content-type"] == "application/json", "{}", reply.status);
    Ok(reply.body)
}

/// Follows the reference of a part of the document, if it is one.
fn resolved<'a>(document: &'a Value, part: &'a Value) -> &'a Value {
    let link = part["$ref"].as_str().and_then(|link| link.strip_prefix('#'));
    link.and_then(|pointer| document.pointer(pointer)).unwrap_or(part)
}

/// Returns method, path and operation of everything in the document.
fn operations(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    let paths = document["paths"].as_object().into_iter().flatten();
    paths.flat_map(|(path, methods)| {
        methods.as_object().into_iter().flatten().map(move |(method, operation)| (&**method, &**path, operation))
    })
}

#[tokio::test]
async fn every_route_is_described_and_nothing_else_is() -> Result<()> {
    let document = document().await?;
    assert_eq!(document["openapi"], "3.1.0");
    let described: BTreeSet<_> =
        operations(&document).map(|(method, path, _)| (method.to_uppercase(), anonymize_path(path))).collect();
    let routed = gateway_routes()?;
    let missing: Vec<_> = routed.difference(&described).collect();
    let stale: Vec<_> = described.difference(&routed).collect();
    assert!(missing.is_empty() && stale.is_empty(), "not described: {missing:?}; not routed: {stale:?}");
    Ok(())
}

#[tokio::test]
async fn every_operation_is_described_completely() -> Result<()> {
    let document = document().await?;
    let tags: BTreeSet<_> =
        document["tags"].as_array().into_iter().flatten().map(|tag| tag["name"].clone().to_string()).collect();
    let schemes = document["components"]["securitySchemes"].as_object().context("securitySchemes")?;
    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&document) {
        let what = format!("{method} {path}");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        assert!(!text(&operation["summary"]).is_empty(), "{what} has no summary");
        assert!(!text(&operation["summary"]).starts_with('`'), "{what}: its summary is its path");
        assert!(ids.insert(text(&operation["operationId"])), "{what}: {} is taken", operation["operationId"]);
        assert!(tags.contains(&operation["tags"][0].to_string()), "{what}: unknown tag {}", operation["tags"]);
        for scheme in operation["security"].as_array().into_iter().flatten().filter_map(Value::as_object) {
            assert!(scheme.keys().all(|name| schemes.contains_key(name)), "{what}: {scheme:?}");
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(!text(&parameter["description"]).is_empty(), "{what}: {} is not described", parameter["name"]);
        }
        let responses = operation["responses"].as_object().with_context(|| what.clone())?;
        assert!(responses.keys().any(|status| status.as_str() < "400"), "{what} never succeeds");
        for (status, response) in responses {
            assert!(
                !text(&resolved(&document, response)["description"]).is_empty(),
                "{what}: {status} is not described"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_body_and_answer_has_an_example_and_every_example_is_valid() -> Result<()> {
    let document = document().await?;
    for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
        jsonschema::meta::validate(schema).map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
    }
    let mut checked = 0;
    let mut wrong = Vec::new();
    for (method, path, operation) in operations(&document) {
        let responses = operation["responses"].as_object().into_iter().flatten();
        let contents = responses.map(|(status, response)| (status.as_str(), &resolved(&document, response)["content"]));
        for (place, content) in contents.chain([("body", &operation["requestBody"]["content"])]) {
            let Some(media) = content.get("application/json") else { continue };
            // The document contains no example of itself.
            if path == "/openapi.json" {
                continue;
            }
            let what = format!("{method} {path} {place}");
            match media.get("example") {
                None => wrong.push(format!("{what}: no example; a field without one?")),
                Some(example) => {
                    wrong.extend(faults(&document, &media["schema"], example)?.map(|why| format!("{what}: {why}")))
                }
            }
            checked += 1;
        }
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            if let Some(example) = parameter.get("example") {
                let faults = faults(&document, &parameter["schema"], example)?;
                wrong.extend(faults.map(|why| format!("{method} {path} {}: {why}", parameter["name"])));
                checked += 1;
            }
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
        let examples = schema["examples"].as_array().into_iter().flatten();
        for example in examples.chain(schema.get("example")) {
            wrong.extend(faults(&document, schema, example)?.map(|why| format!("schema {name}: {why}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(checked > 200, "only {checked} examples");
    Ok(())
}

/// Returns the violations of a schema by a value.
fn faults(document: &Value, schema: &Value, value: &Value) -> Result<impl Iterator<Item = String>> {
    let mut schema = schema.clone();
    let whole = schema.as_object_mut().context("a schema is an object")?;
    whole.insert("components".into(), document["components"].clone());
    let validator = jsonschema::draft202012::options()
        .should_validate_formats(true)
        .build(&schema)
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    let faults: Vec<_> =
        validator.iter_errors(value).map(|error| format!("{error} at {}", error.instance_path())).collect();
    Ok(faults.into_iter())
}

#[tokio::test]
async fn the_reference_page_needs_nothing_from_elsewhere() -> Result<()> {
    let base = shared().await.any_gateway();
    let page = Raw::new("GET", format!("{base}/docs")).send().await?;
    assert_eq!(page.status, 200);
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    let policy = page.headers["content-security-policy"].to_str()?;
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    let text = page.body.as_str().unwrap_or_default();
    assert!(text.contains("openapi.json"), "it asks for the document");
    for foreign in ["http://", "https://", "src=\"//", "@import"] {
        assert!(!text.contains(foreign), "{foreign} in the page");
    }
    Ok(())
}

/// Two types with one name would silently share a schema.
#[test]
fn names_of_wire_types_are_unique() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/wire/src");
    let mut names = BTreeSet::new();
    for path in rust_files(&folder)? {
        let source = std::fs::read_to_string(path)?;
        for derived in source.split("ToSchema)]").skip(1) {
            let item = derived.lines().find_map(|line| line.trim().strip_prefix("pub ")).unwrap_or_default();
            let name =
                item.split_whitespace().nth(1).unwrap_or_default().trim_end_matches(|end: char| !end.is_alphanumeric());
            assert!(name == "$name" || names.insert(name.to_owned()), "two wire types are called {name}");
        }
        for words in source.split("words!(").skip(1) {
            let name = words.lines().find_map(|line| line.trim().split_once(" {")).map_or("", |(name, _)| name);
            assert!(names.insert(name.to_owned()), "two wire types are called {name}");
        }
    }
    ensure!(names.len() > 80, "only {} types were found", names.len());
    Ok(())
}

/// Returns all Rust files below a folder.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns all required names of an object schema and of its parts.
fn required<'a>(document: &'a Value, schema: &'a Value) -> BTreeSet<&'a str> {
    let schema = resolved(document, schema);
    let own = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let parts = schema["allOf"].as_array().into_iter().flatten();
    own.chain(parts.flat_map(|part| required(document, part))).collect()
}

/// Some published clients fail without these fields (docs/protocol/rest.md, "Fields for strict clients").
#[tokio::test]
async fn fields_required_by_strict_clients_are_required_in_the_document() -> Result<()> {
    let document = document().await?;
    let table: &[(&str, &str, &str)] = &[
        ("get", "/v1/workspace", "api_key_hash"),
        ("patch", "/v1/workspace", "api_key_hash"),
        ("post", "/v1/workspaces", "api_key"),
        ("get", "/v1/agents", "workspace_id token_hash status created_at last_seen persona metadata"),
        ("get", "/v1/agent", "workspace_id token_hash status created_at last_seen persona metadata channels"),
        ("post", "/v1/agents", "status token"),
        ("post", "/v1/channels", "workspace_id channel_type is_archived"),
        ("get", "/v1/channels", "workspace_id channel_type is_archived"),
        ("patch", "/v1/channels/{name}/topic", "workspace_id channel_type is_archived"),
        ("get", "/v1/channels/{name}", "workspace_id channel_type is_archived members"),
        ("get", "/v1/messages/{id}", "metadata attachments reply_count reactions read_by_count mentions"),
        ("get", "/v1/dm/conversations", "participants last_message unread_count"),
        ("get", "/v1/nodes", "load version live handlers_live active_agents max_agents"),
        ("get", "/v1/deliveries", "seq location_type mode priority updated_at message"),
    ];
    for (method, path, fields) in table {
        let responses = &document["paths"][path][method]["responses"];
        let answer =
            responses.get("200").or_else(|| responses.get("201")).with_context(|| format!("{method} {path}"))?;
        let data = &answer["content"]["application/json"]["schema"]["properties"]["data"];
        // These clients request the first of several forms.
        let data = resolved(&document, data);
        let data = data.get("oneOf").map_or(data, |forms| &forms[0]);
        let promised = required(&document, data.get("items").unwrap_or(data));
        for field in fields.split(' ') {
            assert!(promised.contains(field), "{method} {path} does not promise {field}: {promised:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_code_is_explained() -> Result<()> {
    let explained = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md"))?;
    let document = document().await?;
    let mut codes = BTreeSet::new();
    for response in document["components"]["responses"].as_object().context("responses")?.values() {
        let schema = &response["content"]["application/json"]["schema"]["allOf"][1];
        let listed = schema["properties"]["error"]["properties"]["code"]["enum"].as_array();
        codes.extend(listed.into_iter().flatten().filter_map(Value::as_str));
    }
    ensure!(codes.len() > 40, "only {} codes were found", codes.len());
    let missing: Vec<_> = codes.iter().filter(|code| !explained.contains(&format!("`{code}`"))).collect();
    assert!(missing.is_empty(), "not in docs/errors.md: {missing:?}");
    Ok(())
}

/// The `tenancy` tests check that the gateway matches these classes.
#[tokio::test]
async fn documented_authentication_matches_the_routes() -> Result<()> {
    use Class as C;
    let document = document().await?;
    for (method, path, class, _) in ROUTES {
        let tokens: &[&str] = match class {
            C::None => &[],
            C::MaybeKey => &["", "workspace_key", "operator"],
            C::Key => &["workspace_key"],
            C::Agent | C::Acting => &["agent_token"],
            C::Any => &["workspace_key", "agent_token"],
            C::Observe | C::ReadAnything | C::Read => &["workspace_key", "observer_token"],
            C::ReadOrAgent => &["workspace_key", "agent_token", "observer_token"],
            C::ReadOrAgentOrNode => &["workspace_key", "agent_token", "observer_token", "node_token"],
            C::Sender => &["agent_token", "node_token"],
            C::Operator => &["operator"],
            C::Hook => &["webhook_token"],
            C::Socket => &["node_token"],
        };
        let (.., operation) = operations(&document)
            .find(|(verb, other, _)| verb.eq_ignore_ascii_case(method) && anonymize_path(other) == anonymize_path(path))
            .with_context(|| format!("{method} {path}"))?;
        let ways = operation["security"].as_array().into_iter().flatten().filter_map(Value::as_object);
        let reported: BTreeSet<&str> = ways.map(|way| way.keys().next().map_or("", String::as_str)).collect();
        assert_eq!(reported, tokens.iter().copied().collect(), "{method} {path}");
    }
    Ok(())
}

/// Checks every row of the table of unsupported routes.
#[tokio::test]
async fn routes_documented_as_not_served_answer_404() -> Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/compatibility.md");
    let docs = std::fs::read_to_string(docs)?;
    let (_, listed) = docs.split_once("## Not served").context("the section")?;
    let (listed, _) = listed.split_once("\n## ").context("its end")?;
    let base = shared().await.any_gateway();
    let key = relay_testkit::client::Api::create_workspace(base, "not-served").await?;
    let routes: Vec<(&str, &str)> = listed.split('`').filter_map(|part| part.split_once(" /")).collect();
    ensure!(routes.len() >= 30, "{} routes", routes.len());
    for (method, path) in routes {
        let path: Vec<&str> = path.split('/').map(|part| if part.starts_with(':') { "x" } else { part }).collect();
        let path = format!("/{}", path.join("/"));
        let body = (method != "GET").then(|| serde_json::json!({}));
        let reply = key.call(method.parse()?, &path, body, &[]).await?;
        reply.refused(404, "not_found").with_context(|| format!("{method} {path}"))?;
    }
    Ok(())
}
