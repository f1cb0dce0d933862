//! The crate `relaycast` 12.0.0, unmodified, against two gateways, one of which is killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos::database::Database;
use relay_acceptance::clients::{ClientHistory, Front};
use relay_acceptance::golden::Tapped;
use relay_testkit::client::Api;
use relay_testkit::history::Losses;
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use relaycast::types::{
    CreateObserverTokenRequest, CreateTriggerRequest, CreateWebhookRequest, EmitSessionEventRequest, FileListOptions,
    ListSessionEventsQuery, ObserverScope, ObserverTokenFilters, SearchOptions, SetSystemPromptRequest,
    UpdateObserverTokenRequest, UploadRequest, WebhookTriggerRequest,
};
use relaycast::{
    AgentClient, CreateAgentRequest, CreateChannelRequest, CreateGroupDmRequest, EventReceiver, RelayCast,
    RelayCastOptions, RelayError, WorkspaceProvenance,
};

const ARRIVES_WITHIN: Duration = Duration::from_secs(40);

fn agent(name: &str) -> CreateAgentRequest {
    CreateAgentRequest { name: name.to_owned(), agent_type: Some("agent".to_owned()), persona: None, metadata: None }
}

/// Returns the next `count` live texts with the types of their events.
async fn texts(events: &mut EventReceiver, count: usize) -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    while texts.len() < count {
        let next = tokio::time::timeout(ARRIVES_WITHIN, events.recv()).await;
        let event = next.with_context(|| format!("only {texts:?} arrived"))?.context("the client's stream")?;
        let event = serde_json::to_value(event)?;
        if let Some(text) = event["message"]["text"].as_str() {
            texts.push((event["type"].as_str().unwrap_or_default().to_owned(), text.to_owned()));
        }
    }
    Ok(texts)
}

async fn send(from: &AgentClient, text: &str) -> Result<String> {
    Ok(from.send("#plans", text, None, None, None).await?.id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_works_and_survives_its_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let gateways = Tapped::new([front.url()]).await?;
    let made = RelayCast::create_workspace("sdk-rust", Some(other.url()), WorkspaceProvenance::sdk()).await?;
    let there = RelayCast::new(RelayCastOptions::new(made.api_key.as_str()).with_base_url(other.url()))?;
    let here = RelayCast::new(RelayCastOptions::new(made.api_key.as_str()).with_base_url(gateways.urls()[0]))?;
    assert_eq!(here.workspace_info().await?.name, "sdk-rust");

    let registered = there.register_agent(agent("ada")).await?;
    match here.register_agent(agent("ada")).await {
        Err(RelayError::Api { code, status: 409, .. }) => assert_eq!(code, "agent_already_exists"),
        answer => panic!("a name was given twice: {answer:?}"),
    }
    // This client rotates with the agent's own token.
    let rotated = there.rotate_agent_token("ada", registered.token.as_str()).await?;
    assert!(there.get_current_agent(registered.token).await.is_err(), "the old token is dead");
    let ada = there.as_agent(rotated.token)?;
    assert_eq!(ada.me().await?.name, "ada");
    let bob_token = there.register_agent(agent("bob")).await?.token;
    let mut bob = here.as_agent(bob_token.as_str())?;

    let plans = CreateChannelRequest { name: "plans".to_owned(), topic: Some("today".to_owned()), metadata: None };
    assert_eq!(ada.create_channel(plans).await?.name, "plans");
    bob.join_channel("plans").await?;
    assert!(bob.list_channels(false).await?.iter().any(|channel| channel.name == "plans"));
    bob.connect().await?;
    let mut events = bob.subscribe_events()?;

    let history = ClientHistory::new("bob");
    let first = send(&ada, "first").await?;
    history.record_post("first", &first);
    ada.reply(&first, "in a thread", None, None).await?;
    let dm = ada.dm_typed("bob", "between us", None).await?;
    let request =
        CreateGroupDmRequest { participants: vec!["bob".to_owned()], name: None, text: "hello group".to_owned() };
    let group = ada.create_group_dm_typed(request).await?;
    ada.send_dm_message_typed(&group.id, "in the group", None).await?;
    let live = texts(&mut events, 5).await?;
    let live: Vec<(&str, &str)> = live.iter().map(|(kind, text)| (kind.as_str(), text.as_str())).collect();
    let expected = [
        ("message.created", "first"),
        ("thread.reply", "in a thread"),
        ("dm.received", "between us"),
        ("group_dm.received", "hello group"),
        ("group_dm.received", "in the group"),
    ];
    assert_eq!(live, expected);

    let key = Some("the-same-key".to_owned());
    let once = ada.send("plans", "once", None, None, key.clone()).await?;
    assert_eq!(ada.send("plans", "once", None, None, key).await?.id, once.id);
    history.record_post("once", &once.id);
    assert_eq!(texts(&mut events, 1).await?[0].1, "once");
    assert_eq!(bob.thread(&first, None).await?.replies.len(), 1);
    assert_eq!(bob.messages("plans", None).await?.len(), 2);
    assert_eq!(bob.dm_messages(&dm.conversation_id, None).await?.len(), 1);
    bob.mark_read(&first).await?;

    // An unflushed ack may be lost with the gateway, and this client shows repeated messages.
    let mailbox = Api::new(other.url(), &bob_token);
    wait::until_ok("all acks to be stored", ARRIVES_WITHIN, || async {
        let unsettled = mailbox.get("/v1/deliveries").await?.success()?;
        ensure!(unsettled == serde_json::json!([]), "unsettled: {unsettled}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    println!("the client's gateway is killed");
    victim.kill9();
    let meanwhile: Vec<String> = (1..=10).map(|n| format!("meanwhile {n}")).collect();
    for text in &meanwhile {
        history.record_post(text, &send(&ada, text).await?);
    }
    let arrived = texts(&mut events, meanwhile.len()).await.inspect_err(|_| println!("{}", stack.logs(30)))?;
    assert_eq!(arrived.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), meanwhile);
    ensure!(front.current() == 1, "the other gateway serves it");
    bob.disconnect().await;
    let (database, workspace) =
        (Database::connect(stack.database_url())?, Api::new(other.url(), made.api_key.as_str()));
    history.judge(gateways.recording(), &database, &workspace, Losses::None).await
}

/// Creates ada at one gateway, bob at the other, both in `#plans`, and the workspace clients there.
async fn pair(name: &str, gateways: &Tapped<2>) -> Result<([RelayCast; 2], AgentClient, AgentClient)> {
    let gateways = gateways.urls();
    let made = RelayCast::create_workspace(name, Some(gateways[0]), WorkspaceProvenance::sdk()).await?;
    let options = |gateway: &str| RelayCastOptions::new(made.api_key.as_str()).with_base_url(gateway);
    let (here, there) = (RelayCast::new(options(gateways[0]))?, RelayCast::new(options(gateways[1]))?);
    let ada = here.as_agent(here.register_agent(agent("ada")).await?.token)?;
    let bob = there.as_agent(there.register_agent(agent("bob")).await?.token)?;
    ada.create_channel(CreateChannelRequest { name: "plans".to_owned(), topic: None, metadata: None }).await?;
    bob.join_channel("plans").await?;
    Ok(([here, there], ada, bob))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_reads_unread_messages_and_searches() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let ([here, there], ada, bob) = pair("sdk-rust-reading", &gateways).await?;
    let mine = send(&bob, "from bob").await?;
    let (first, second) = (send(&ada, "unread one").await?, send(&ada, "unread two, @bob").await?);
    let dm = ada.dm_typed("bob", "a letter", None).await?;
    // This client expects a text for the last message where others expect an object.
    let inbox = bob.inbox().await?;
    assert_eq!((&*inbox.unread_channels[0].channel_name, inbox.unread_channels[0].unread_count), ("plans", 2));
    assert_eq!(inbox.mentions.iter().map(|mention| &*mention.id).collect::<Vec<_>>(), [&*second]);
    let letter = &inbox.unread_dms[0];
    assert_eq!((&*letter.from, letter.unread_count, letter.last_message.as_deref()), ("ada", 1, Some("a letter")));
    for read in [&first, &second, &dm.message.id] {
        bob.mark_read(read).await?;
    }
    let inbox = bob.inbox().await?;
    ensure!(inbox.unread_channels.is_empty() && inbox.unread_dms.is_empty(), "unread: {inbox:?}");
    assert_eq!(ada.readers(&first).await?[0].agent_name, "bob");
    let status = ada.read_status("plans").await?;
    assert!(status.iter().any(|one| one.agent_name == "bob" && one.last_read_id.as_ref() == Some(&second)));

    ada.react(&mine, "eyes").await?;
    ada.react(&mine, "eyes").await?;
    let groups = there.get_message_reactions(&mine).await?;
    assert_eq!((&*groups[0].emoji, groups[0].count, &*groups[0].agents), ("eyes", 1, &["ada".to_owned()][..]));
    ada.unreact(&mine, "eyes").await?;
    assert!(bob.reactions(&mine).await?.is_empty());

    let only = SearchOptions {
        channel: Some("plans".to_owned()),
        from: Some("ada".to_owned()),
        limit: Some(1),
        before: None,
        after: Some(first.clone()),
    };
    let hits = bob.search("unread", Some(only)).await?;
    assert_eq!(hits.iter().map(|hit| hit["id"].as_str().unwrap_or_default()).collect::<Vec<_>>(), [&*second]);

    let conversations = here.all_dm_conversations().await?;
    assert_eq!((&*conversations[0].id, conversations[0].message_count), (&*dm.conversation_id, 1));
    assert_eq!(there.dm_messages(&dm.conversation_id, None).await?[0].text, "a letter");
    assert_eq!(bob.dm_conversations().await?[0].last_message.as_deref(), Some("a letter"));
    let stats = here.stats().await?;
    assert_eq!((stats.agents.total, stats.messages.total, stats.channels.total), (2, 4, 2));
    // No message states a latency, and this client's type accepts no null.
    let overview = there.console_stats(None).await?;
    assert_eq!((overview.total_messages, overview.dm_messages, overview.avg_latency_ms), (4, 1, 0.0));
    let authors = here.console_agents(None).await?;
    assert_eq!((&*authors[0].agent_name, authors[0].message_count), ("ada", 3));
    assert_eq!(there.console_costs(None).await?.totals.total_tokens, 0);
    assert_eq!(here.console_messages(None).await?.len(), 4);
    let activity = there.activity(Some(2)).await?;
    assert_eq!(activity.iter().map(|item| &*item.item_type).collect::<Vec<_>>(), ["dm", "message"]);
    gateways.compare("rust_reading")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_lists_all_conversations_page_by_page() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let ([here, _], ada, _) = pair("sdk-rust-pages", &gateways).await?;
    // The client requests 500 at a time.
    for nth in 0..501 {
        let group = CreateGroupDmRequest {
            participants: vec!["bob".to_owned()],
            name: Some(format!("group {nth}")),
            text: String::new(),
        };
        ada.create_group_dm_typed(group).await?;
    }
    let all = here.all_dm_conversations().await?;
    let ids: std::collections::BTreeSet<_> = all.iter().map(|one| one.id.as_str()).collect();
    assert_eq!((all.len(), ids.len()), (501, 501));
    gateways.compare("rust_pages")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_uses_files_webhooks_observer_tokens_and_session_events() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let ([here, there], ada, bob) = pair("sdk-rust-rest", &gateways).await?;
    let http = relay_testkit::http::client().build()?;
    let content = "what the file holds\n";
    let request = UploadRequest {
        filename: "plan.txt".to_owned(),
        content_type: "text/plain".to_owned(),
        size_bytes: i64::try_from(content.len())?,
    };
    let upload = ada.upload_file(request).await?;
    let put = http.put(&upload.upload_url).header("Content-Type", "text/plain").body(content).send().await?;
    ensure!(put.status().is_success(), "{}", put.status());
    let file = ada.complete_upload(&upload.file_id).await?;
    let info = bob.get_file(&file.file_id).await?;
    assert_eq!((&*info.filename, info.size, &*info.uploaded_by), ("plan.txt", i64::try_from(content.len())?, "ada"));
    assert_eq!(http.get(&info.url).send().await?.text().await?, content);
    let listed = bob.list_files(Some(FileListOptions { uploaded_by: None, limit: Some(5) })).await?;
    assert_eq!(listed.iter().map(|one| &one.file_id).collect::<Vec<_>>(), [&file.file_id]);
    let posted = ada.send("plans", "see the file", Some(vec![file.file_id.clone()]), None, None).await?;
    assert_eq!(posted.attachments[0].filename, "plan.txt");
    ada.delete_file(&file.file_id).await?;

    let hook =
        here.create_webhook(CreateWebhookRequest { name: Some("builds".to_owned()), channel: "plans".to_owned() });
    let hook = hook.await?;
    let text = WebhookTriggerRequest { text: Some("green".to_owned()), ..WebhookTriggerRequest::default() };
    let answer = there.trigger_webhook(&hook.webhook_id, text, hook.token.as_str()).await?;
    assert_eq!(bob.message(&answer.message_id).await?.text, "green");
    assert_eq!(there.list_webhooks().await?[0].channel_name, "plans");
    here.delete_webhook(&hook.webhook_id).await?;

    let request = CreateObserverTokenRequest {
        name: "board".to_owned(),
        scopes: vec![ObserverScope::StreamRead, ObserverScope::MessagesRead],
        description: None,
        filters: Some(ObserverTokenFilters {
            channel_names: vec!["plans".to_owned()],
            ..ObserverTokenFilters::default()
        }),
        expires_at: None,
    };
    let made = here.create_observer_token(request).await?;
    let token = made.token.context("a token that is just made")?;
    let observer = RelayCast::new(RelayCastOptions::new(token).with_base_url(gateways.urls()[1]))?;
    assert_eq!(observer.list_messages("plans", None).await?.len(), 2);
    match observer.list_messages("general", None).await {
        Err(RelayError::Api { status: 404, .. }) => {}
        answer => panic!("a hidden channel: {answer:?}"),
    }
    let update = UpdateObserverTokenRequest {
        description: Some("on the wall".to_owned()),
        ..UpdateObserverTokenRequest::default()
    };
    let updated = there.update_observer_token(&made.id, update).await?;
    assert_eq!(updated.description.as_deref(), Some("on the wall"));
    assert_eq!(here.get_observer_token(&made.id).await?.scopes.len(), 2);
    ensure!(there.rotate_observer_token(&made.id).await?.token.is_some(), "a rotation gives a token");
    assert_eq!(here.list_observer_tokens().await?[0].id, made.id);
    here.revoke_observer_token(&made.id).await?;
    wait::until_ok("the revoked token to be refused", ARRIVES_WITHIN, || async {
        ensure!(observer.list_messages("plans", None).await.is_err(), "it still reads");
        Ok::<_, anyhow::Error>(())
    })
    .await?;

    let event = || EmitSessionEventRequest { event_type: "tool.called".to_owned(), payload: None };
    let once = here.emit_agent_event_with_idempotency_key("ada", event(), "the-same-key").await?;
    let again = there.emit_agent_event_with_idempotency_key("ada", event(), "the-same-key").await?;
    assert_eq!((once.sequence, &once.id), (Some(1), &again.id));
    assert_eq!(here.emit_agent_event("ada", event()).await?.sequence, Some(2));
    let query = ListSessionEventsQuery { event_type: Some("tool.called".to_owned()), limit: Some(5) };
    let events = there.list_agent_events("ada", Some(query)).await?;
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [Some(2), Some(1)]);
    let prompt = SetSystemPromptRequest { prompt: Some("be brief".to_owned()), reset: None };
    assert_eq!(here.set_system_prompt(prompt).await?.prompt, "be brief");
    assert_eq!(there.get_system_prompt().await?.prompt, "be brief");
    gateways.compare("rust_rest")
}

/// A handler in another language returns a value that is not an object; this client's types accept objects only.
#[tokio::test]
async fn the_rust_sdk_reads_an_outcome_that_is_not_an_object() -> Result<()> {
    let gateways = Tapped::shared().await?;
    let [a, b] = gateways.urls();
    let made = RelayCast::create_workspace("sdk-rust-actions", Some(a), WorkspaceProvenance::sdk()).await?;
    let key = Api::new(a, made.api_key.as_str());
    let there = RelayCast::new(RelayCastOptions::new(made.api_key.as_str()).with_base_url(b))?;
    let ada = there.as_agent(there.register_agent(agent("ada")).await?.token)?;
    there.register_agent(agent("bob")).await?;
    let count = serde_json::json!({ "name": "count", "description": "", "handler_agent": "bob" });
    key.post("/v1/actions", count).await?.success()?;
    let asked = ada.invoke_action("count", None).await?;
    let complete = format!("/v1/actions/count/invocations/{}/complete", asked.invocation_id);
    key.post(&complete, serde_json::json!({ "output": [1, 2] })).await?.success()?;
    let read = ada.get_action_invocation("count", &asked.invocation_id).await?;
    let output = serde_json::Value::Object(read.output.context("an output")?);
    assert_eq!(output, serde_json::json!({ "value": [1, 2] }));
    // The condition of a trigger is a boolean to this client, and may be the name of an agent elsewhere.
    let request = CreateTriggerRequest {
        channel: None,
        pattern: None,
        mention: Some(true),
        action_name: "count".to_owned(),
        enabled: None,
    };
    assert_eq!(there.create_trigger(request).await?.mention, Some(true));
    key.post("/v1/triggers", serde_json::json!({ "mention": "@bob", "action_name": "count" })).await?.success()?;
    let listed = there.list_triggers().await?;
    assert_eq!(listed.iter().map(|trigger| trigger.mention).collect::<Vec<_>>(), [Some(true), Some(true)]);
    gateways.compare("rust_actions")
}
