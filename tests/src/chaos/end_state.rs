//! State at the end of a test, which its history judges: stored messages, lists and positions of mailboxes, and what
//! endpoints received.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{
    client::Api,
    history::{Content, Floors, History, Losses},
    receiver::Received,
};

use super::database::{Database, MailboxPosition};

/// Records the deliveries that the endpoint of an agent received, each of which it acknowledged with a 2xx.
pub fn record_calls(history: &History, agent: &str, calls: &[Arc<Received>]) -> Result<()> {
    for call in calls {
        let (body, seq) = (call.json(), call.seq().unsigned_abs());
        let delivery_id = body["delivery_id"].as_str().context("no delivery id")?.to_owned();
        let text = body["data"]["text"].as_str().map(str::to_owned);
        history.record_frame(agent, seq, Content { delivery_id, text });
        history.record_ack(agent, seq);
    }
    Ok(())
}

/// Records the state of the only workspace, whose key `workspace` has, and judges the history. Fails with the first
/// violations.
pub async fn judge(history: &History, database: &Database, workspace: &Api, losses: Losses<'_>) -> Result<()> {
    record_end_state(history, database, workspace).await?;
    let violations = history.violations(losses);
    let first = &violations[..violations.len().min(20)];
    ensure!(violations.is_empty(), "{} violations: {first:#?}", violations.len());
    Ok(())
}

async fn record_end_state(history: &History, database: &Database, workspace: &Api) -> Result<()> {
    history.record_stored(database.messages().await?);
    for texts in list_all(workspace).await? {
        history.record_listing(texts);
    }
    for (agent, position) in database.mailbox_positions().await? {
        let MailboxPosition { head, sent, ack_floor, settled_floor } = position;
        history.record_floors(&agent, Floors { head, sent, acked: ack_floor, settled: settled_floor });
    }
    Ok(())
}

/// Returns the texts of every channel and conversation, oldest first.
async fn list_all(workspace: &Api) -> Result<Vec<Vec<String>>> {
    let conversations = workspace.get("/v1/dm/conversations/all?limit=500").await?.success()?;
    let channels = workspace.get("/v1/channels").await?.success()?;
    let mut paths = Vec::new();
    for conversation in conversations.as_array().context("conversations")? {
        paths.push(format!("/v1/dm/conversations/{}/messages", conversation["id"].as_str().context("an id")?));
    }
    for channel in channels.as_array().context("channels")? {
        paths.push(format!("/v1/channels/{}/messages", channel["name"].as_str().context("a name")?));
    }
    let mut listings = Vec::new();
    for path in paths {
        listings.push(list_texts(workspace, &path).await?);
    }
    Ok(listings)
}

/// Reads all pages of messages, which list the newest first.
async fn list_texts(api: &Api, path: &str) -> Result<Vec<String>> {
    let (mut texts, mut before) = (Vec::new(), String::new());
    loop {
        let page = api.get(&format!("{path}?limit=100{before}")).await?.success()?;
        let page = page.as_array().with_context(|| format!("no messages in {page}"))?;
        for message in page {
            texts.push(message["text"].as_str().context("a text")?.to_owned());
        }
        // A page of large messages may be shorter than others.
        let Some(oldest) = page.last() else { break };
        before = format!("&before={}", oldest["id"].as_str().context("an id")?);
    }
    texts.reverse();
    Ok(texts)
}
