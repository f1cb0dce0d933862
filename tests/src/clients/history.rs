//! History of a published client that stays connected during a fault. Clients show texts without seqs.

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{
    client::Api,
    history::{Answer, Content, History, Losses, Post, tick},
};
use serde_json::Value;

use super::Request;
use crate::chaos::{database::Database, end_state::record_end_state};

/// Posts of one sender, which awaits each answer, and what the recipient's client showed.
#[derive(Debug)]
pub struct ClientHistory {
    recipient: String,
    history: History,
}

impl ClientHistory {
    pub fn new(recipient: &str) -> Self {
        Self { recipient: recipient.to_owned(), history: History::default() }
    }

    /// Records an accepted post, in the order of the posts.
    pub fn record_post(&self, text: &str, id: &str) {
        self.history.record_post(Post {
            asked_at: tick(),
            answered_at: tick(),
            sender: Some("lead".to_owned()),
            key: None,
            text: text.to_owned(),
            recipients: vec![self.recipient.clone()],
            answer: Answer::Accepted(id.to_owned()),
        });
    }

    /// Records all texts that the client has shown, in their order, which stands for the seqs.
    pub fn record_shown<'a>(&self, texts: impl IntoIterator<Item = &'a str>) {
        for (seq, text) in (1..).zip(texts) {
            let content = Content { delivery_id: String::new(), text: Some(text.to_owned()) };
            self.history.record_frame(&self.recipient, seq, content);
        }
    }

    /// Records a script's report: `{"posts": [[text, id], …], "shown": [text, …]}`.
    pub fn record_report(&self, request: &Request) -> Result<()> {
        let report: Value = serde_json::from_str(&request.0).with_context(|| format!("{request:?} is no report"))?;
        for post in report["posts"].as_array().context("posts")? {
            self.record_post(post[0].as_str().context("a text")?, post[1].as_str().context("an id")?);
        }
        let shown = report["shown"].as_array().context("shown texts")?;
        self.record_shown(shown.iter().filter_map(Value::as_str));
        Ok(())
    }

    /// Judges the posts and texts with the state of the only workspace, whose key `workspace` has. Nothing may be lost.
    pub async fn judge(&self, database: &Database, workspace: &Api) -> Result<()> {
        record_end_state(&self.history, database, workspace).await?;
        // A failover that loses nothing: heads may have jumped above what was received.
        let violations = self.history.violations(Losses::Within(&[]));
        ensure!(violations.is_empty(), "{} violations: {violations:#?}", violations.len());
        Ok(())
    }
}
