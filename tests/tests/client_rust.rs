//! The crate `relaycast` 12.0.0, unmodified, against two gateways, one of which is killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::clients::Front;
use relay_testkit::client::Api;
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use relaycast::{
    AgentClient, CreateAgentRequest, CreateChannelRequest, CreateGroupDmRequest, EventReceiver, RelayCast,
    RelayCastOptions, RelayError, WorkspaceProvenance,
};

const ARRIVES_WITHIN: Duration = Duration::from_secs(40);

fn agent(name: &str) -> CreateAgentRequest {
    CreateAgentRequest { name: name.to_owned(), agent_type: Some("agent".to_owned()), persona: None, metadata: None }
}

/// The next `count` texts that arrive live, with the types of their events.
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
    let made = RelayCast::create_workspace("sdk-rust", Some(other.url()), WorkspaceProvenance::sdk()).await?;
    let there = RelayCast::new(RelayCastOptions::new(made.api_key.as_str()).with_base_url(other.url()))?;
    let here = RelayCast::new(RelayCastOptions::new(made.api_key.as_str()).with_base_url(front.url()))?;
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

    let first = send(&ada, "first").await?;
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
    assert_eq!(texts(&mut events, 1).await?[0].1, "once");
    assert_eq!(bob.thread(&first, None).await?.replies.len(), 1);
    assert_eq!(bob.messages("plans", None).await?.len(), 2);
    assert_eq!(bob.dm_messages(&dm.conversation_id, None).await?.len(), 1);
    bob.mark_read(&first).await?;

    // An ack younger than its flush may be lost with the gateway, and this client shows a repetition.
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
        send(&ada, text).await?;
    }
    let arrived = texts(&mut events, meanwhile.len()).await.inspect_err(|_| println!("{}", stack.logs(30)))?;
    assert_eq!(arrived.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), meanwhile);
    ensure!(front.current() == 1, "the other gateway serves it");
    bob.disconnect().await;
    Ok(())
}
