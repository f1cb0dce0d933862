//! History of a published client that stays connected during a fault: the posts to it, and the frames and acks of its
//! sockets that passed a tap.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::Api,
    history::{Answer, History, Losses, Post, tick},
};
use serde_json::Value;

use super::Request;
use crate::{
    chaos::{database::Database, end_state::judge, ledger::content_of, report::print_row},
    golden::Recording,
};

/// Posts of one sender, which awaits each answer, to one recipient.
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
            key: None,
            text: text.to_owned(),
            recipients: vec![self.recipient.clone()],
            answer: Answer::Accepted(id.to_owned()),
        });
    }

    /// Records a script's report, `{"posts": [[text, id], …]}`, and returns it.
    pub fn record_report(&self, request: &Request) -> Result<Value> {
        let report: Value = serde_json::from_str(&request.0).with_context(|| format!("{request:?} is no report"))?;
        for post in report["posts"].as_array().context("posts")? {
            self.record_post(post[0].as_str().context("a text")?, post[1].as_str().context("an id")?);
        }
        Ok(report)
    }

    /// Judges the posts, what passed on the sockets, and the state of the only workspace, whose key `workspace` has.
    pub async fn judge(
        &self,
        passed: &Recording,
        database: &Database,
        workspace: &Api,
        losses: Losses<'_>,
    ) -> Result<()> {
        for (from_engine, frame) in passed.socket_frames() {
            if frame["agent"] != self.recipient.as_str() {
                continue;
            }
            match (from_engine, frame["type"].as_str()) {
                // Seq 0 asks for a position.
                (true, Some("deliver")) if frame["seq"] != 0 => {
                    let seq = frame["seq"].as_u64().context("a seq")?;
                    self.history.record_frame(&self.recipient, seq, content_of(&frame));
                }
                (false, Some("delivery.ack")) => {
                    self.history.record_ack(&self.recipient, frame["up_to_seq"].as_u64().context("a seq")?);
                }
                _ => {}
            }
        }
        judge(&self.history, database, workspace, losses).await
    }

    /// Prints the figures of a test with a fault, once its history is judged.
    pub fn print_row(&self, fault: &str, service_after: Duration, passed: &Recording) {
        print_row(fault, service_after, &self.history, passed.server_errors());
    }
}
