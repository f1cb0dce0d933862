//! Every reading route with every observer filter and under different rights of agents: no answer contains what the
//! filter hides.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    access::{Class, DEFAULT_RIGHTS, FURTHER_RIGHTS, ROUTES, settings_of_rights},
    raw::Raw,
    room::text,
};
use relay_testkit::{client::Api, shared};
use serde_json::{Value, json};

/// Every scope of observer tokens.
pub(super) const SCOPES: [&str; 12] = [
    "stream:read",
    "messages:read",
    "threads:read",
    "dms:read",
    "channels:read",
    "search:read",
    "agents:read",
    "nodes:read",
    "deliveries:read",
    "activity:read",
    "files:read",
    "reactions:read",
];

/// Workspace whose texts, names and files say where they belong.
struct World {
    key: Api,
    ann: String,
    shown_channel: String,
    other_dm: String,
    /// Candidates for each placeholder.
    names: BTreeMap<&'static str, Vec<String>>,
}

/// Uploads a file; the name says where it will be attached.
async fn upload(api: &Api, name: &str) -> Result<String> {
    let declared = json!({ "filename": name, "content_type": "text/plain", "size_bytes": 1 });
    let declared = api.post("/v1/files/upload", declared).await?.success()?;
    Raw::new("PUT", text(&declared["upload_url"])).body("a").send().await?;
    let id = text(&declared["file_id"]).to_owned();
    api.post(&format!("/v1/files/{id}/complete"), json!({})).await?.success()?;
    Ok(id)
}

async fn post(api: &Api, path: &str, words: &str, file: &str) -> Result<Value> {
    api.post(path, json!({ "text": words, "attachments": [file], "to": "bob" })).await?.success()
}

impl World {
    async fn new() -> Result<Self> {
        let key = Api::create_workspace(shared().await.any_gateway(), "rights-filters").await?;
        let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let eve = key.register_agent("concealed-eve").await?;
        let (as_ann, as_bob, as_eve) = (key.as_agent(&ann), key.as_agent(&bob), key.as_agent(&eve));
        let shown_channel = as_ann.create_channel("shown").await?;
        as_eve.create_channel("concealed-room").await?;
        as_ann.join("concealed-room").await?;
        for (node, agent) in [("box-of-ann", "ann"), ("concealed-box", "concealed-eve")] {
            key.create_broker_node(&format!("node_{node}"), node).await?;
            key.bind(node, agent).await?;
        }
        let mut files = Vec::new();
        for name in ["shown-file", "concealed-room-file", "private-file"] {
            files.push(upload(&as_ann, name).await?);
        }
        let loose = upload(&as_ann, "loose-file").await?;
        let shown = post(&as_ann, "/v1/channels/shown/messages", "shown words", &files[0]).await?;
        let hidden = post(&as_ann, "/v1/channels/concealed-room/messages", "concealed-room words", &files[1]).await?;
        let private = post(&as_ann, "/v1/dm", "private words", &files[2]).await?;
        let by_eve = as_eve.post_message("shown", "concealed-eve words").await?.success()?;
        let other_dm = as_bob.dm("concealed-eve", "other words").await?.success()?;
        files.push(loose);
        let id = |value: &Value| text(&value["id"]).to_owned();
        let names = BTreeMap::from([
            ("{channel}", vec!["shown".to_owned(), "concealed-room".to_owned()]),
            ("{message}", vec![id(&shown), id(&hidden), text(&private["message"]["id"]).to_owned(), id(&by_eve)]),
            ("{file}", files),
            ("{node}", vec!["box-of-ann".to_owned(), "concealed-box".to_owned()]),
            ("{agent}", vec!["ann".to_owned(), "bob".to_owned(), "concealed-eve".to_owned()]),
            ("{conversation}", vec![text(&private["conversation_id"]).to_owned()]),
        ]);
        let other_dm = text(&other_dm["conversation_id"]).to_owned();
        Ok(Self { key, ann: ann.id, shown_channel: id(&shown_channel), other_dm, names })
    }

    /// Filters, with what no answer to their observers may contain.
    fn filters(&self) -> Vec<(Value, &'static [&'static str])> {
        let outside: &[&str] =
            &["concealed-room words", "concealed-room-file", "loose-file", "private words", "private-file"];
        vec![
            (json!({}), &["private words", "private-file", "loose-file", "other words"]),
            (json!({ "channel_names": ["shown"] }), outside),
            (json!({ "channel_ids": [self.shown_channel] }), outside),
            (
                json!({ "include_dms": true, "dm_conversation_ids": [self.other_dm] }),
                &["private words", "private-file"],
            ),
            (
                json!({ "include_dms": true, "agent_ids": [self.ann] }),
                &["concealed-eve words", "concealed-box", "other words"],
            ),
            (
                json!({ "include_dms": true, "created_after": "2099-01-01T00:00:00Z" }),
                &["shown words", "concealed-room words", "private words", "shown-file", "private-file", "loose-file"],
            ),
            (json!({ "include_dms": true }), &[]),
        ]
    }

    /// Returns the paths that observers may read. Sockets and streams send the events of the log, which is among them.
    fn reading_paths(&self) -> Vec<String> {
        let is_read = |class: &Class| {
            matches!(
                class,
                Class::Observe | Class::ReadAnything | Class::Read | Class::ReadOrAgent | Class::ReadOrAgentOrNode
            )
        };
        let is_stream = |path: &str| matches!(path, "/v1/ws" | "/v1/workspace/events/stream");
        let routes =
            ROUTES.iter().filter(|(method, path, class, _)| *method == "GET" && is_read(class) && !is_stream(path));
        routes.flat_map(|(_, path, ..)| self.paths(path)).collect()
    }

    /// Returns a path with every value of its placeholder.
    fn paths(&self, path: &str) -> Vec<String> {
        let query = match path {
            "/v1/search" => "?q=words",
            "/v1/workspace/events" => "?limit=500",
            _ => "",
        };
        match self.names.iter().find(|(hole, _)| path.contains(**hole)) {
            Some((hole, values)) => {
                values.iter().map(|value| format!("{}{query}", path.replace(hole, value))).collect()
            }
            None => vec![format!("{path}{query}")],
        }
    }
}

#[tokio::test]
async fn no_reading_route_shows_what_a_filter_hides() -> Result<()> {
    let world = World::new().await?;
    let mut readers = Vec::new();
    for (number, (filters, hidden)) in world.filters().into_iter().enumerate() {
        let token = json!({ "name": format!("reader-{number}"), "scopes": SCOPES, "filters": filters });
        let token = world.key.post("/v1/observer-tokens", token).await?.success()?;
        readers.push((world.key.with_token(text(&token["token"])), filters, hidden));
    }
    let (mut checked, mut shown) = (0, Vec::new());
    // Observers are no agents: a policy opens and closes nothing to them.
    for granted in [&DEFAULT_RIGHTS[..], &FURTHER_RIGHTS] {
        world.key.patch("/v1/workspace", json!({ "policy": settings_of_rights(granted) })).await?.success()?;
        let mut answers = 0;
        for (reader, filters, hidden) in &readers {
            for path in world.reading_paths() {
                let reply = reader.get(&path).await?;
                ensure!(reply.status < 500, "{path}: {}", reply.body);
                // A refusal repeats the name that was asked for.
                if reply.status >= 400 {
                    continue;
                }
                let answer = reply.body.to_string();
                for word in *hidden {
                    assert!(!answer.contains(word), "{path} with {filters} shows {word:?}: {answer}");
                }
                checked += 1;
                answers += usize::from(answer.contains("shown words"));
            }
        }
        shown.push(answers);
    }
    assert!(checked > 300, "only {checked} answers");
    assert!(shown[0] > 10, "the visible message was in {shown:?} answers only");
    assert_eq!(shown[0], shown[1], "a policy of agents changed what observers see");
    Ok(())
}

/// Counts of a node are of visible agents.
#[tokio::test]
async fn a_node_is_counted_as_far_as_its_agents_are_visible() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "rights-node-counts").await?;
    let node = key.create_broker_node("node_box", "box").await?;
    let mut socket = relay_testkit::client::NodeSocket::connect(&key.ws_base(), &node.token).await?;
    socket.register_broker("node_box", "box", "run-1").await?;
    let (ann, bob) = (socket.register_agent("ann").await?, socket.register_agent("bob").await?);
    let token = json!({ "name": "of-ann", "scopes": ["nodes:read"], "filters": { "agent_ids": [ann["agent_id"]] } });
    let token = key.post("/v1/observer-tokens", token).await?.success()?;
    let reader = key.with_token(text(&token["token"]));
    let listed = reader.get("/v1/nodes").await?.success()?;
    let listed = listed.as_array().context("a list")?;
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((text(&listed[0]["name"]), &listed[0]["active_agents"]), ("box", &json!(1)));
    assert_eq!(reader.get("/v1/nodes/box").await?.success()?["active_agents"], 1);
    assert_eq!(reader.get("/v1/nodes/box/agents").await?.success()?.as_array().map(Vec::len), Some(1));
    socket.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": ann["agent_id"] })).await?;
    assert_eq!(reader.get("/v1/nodes").await?.success()?, json!([]), "bob {bob} is not visible");
    reader.get("/v1/nodes/box").await?.refused(404, "node_not_found")?;
    reader.get("/v1/nodes/box/agents").await?.refused(404, "node_not_found")?;
    Ok(())
}
