//! REST senders that record the outcome of each message.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use relay_testkit::{
    client::{Api, Reply},
    history::{Answer, Post, Tick, tick},
};
use reqwest::Method;
use serde_json::json;

/// Time limit for retrying a message with an idempotency key.
const RETRY_TIMEOUT: Duration = Duration::from_secs(90);
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Delays of published clients before the second, third and fourth attempt; the shortest of the three clients (Python).
const CLIENT_PAUSES: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];

/// Final outcome of a message, as known to its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted with this message id.
    Accepted(String),
    /// Only answers of 4xx or 5xx.
    Refused(u16),
    /// A connection ended without an answer.
    Unknown,
}

/// Sent message with its outcome.
#[derive(Clone, Debug)]
pub struct SentMessage {
    /// Unique text.
    pub text: String,
    pub target: Target,
    pub outcome: Outcome,
    /// Number of attempts.
    pub attempts: u32,
    /// Begin of the first attempt and end of the last.
    pub ticks: (Tick, Tick),
    /// Idempotency key, if it had one.
    pub key: Option<String>,
}

impl SentMessage {
    /// Converts to a record of the history.
    pub fn to_post(&self) -> Post {
        Post {
            asked_at: self.ticks.0,
            answered_at: self.ticks.1,
            key: self.key.clone(),
            text: self.text.clone(),
            recipients: self.target.recipients(),
            answer: match &self.outcome {
                Outcome::Accepted(id) => Answer::Accepted(id.clone()),
                Outcome::Refused(status) => Answer::Refused(*status),
                Outcome::Unknown => Answer::None,
            },
        }
    }
}

/// Destination of a message.
#[derive(Clone, Debug)]
pub enum Target {
    /// Agent, by name.
    Dm(String),
    /// Channel, by name, with its members except the sender.
    Channel(String, Vec<String>),
}

impl Target {
    fn request(&self, text: &str) -> (String, serde_json::Value) {
        match self {
            Self::Dm(to) => ("/v1/dm".to_owned(), json!({ "to": to, "text": text, "mode": "wait" })),
            Self::Channel(name, _) => {
                (format!("/v1/channels/{name}/messages"), json!({ "text": text, "mode": "wait" }))
            }
        }
    }

    fn recipients(&self) -> Vec<String> {
        match self {
            Self::Dm(to) => vec![to.clone()],
            Self::Channel(_, members) => members.clone(),
        }
    }
}

/// Sends once without an idempotency key; the first answer is final.
pub async fn send_once(api: &Api, target: &Target, text: &str) -> Result<SentMessage> {
    let (path, body) = target.request(text);
    let asked_at = tick();
    let outcome = match api.without_retries().post(&path, body).await {
        Ok(reply) if reply.is_success() => Outcome::Accepted(posted_message_id(&reply)?),
        Ok(reply) => Outcome::Refused(reply.status),
        Err(_) => Outcome::Unknown,
    };
    let ticks = (asked_at, tick());
    let (text, target) = (text.to_owned(), target.clone());
    Ok(SentMessage { text, target, outcome, attempts: 1, ticks, key: None })
}

/// Sends a direct message that must be accepted. Returns the answer, and the record of the post.
pub async fn send_accepted(api: &Api, to: &str, text: &str) -> Result<(Reply, Post)> {
    send_accepted_request(api, to, text, json!({ "to": to, "text": text, "mode": "wait" })).await
}

/// The same with other fields in the body of the request.
pub async fn send_accepted_request(
    api: &Api,
    to: &str,
    text: &str,
    request: serde_json::Value,
) -> Result<(Reply, Post)> {
    let asked_at = tick();
    let reply = api.post("/v1/dm", request).await?;
    ensure!(reply.is_success(), "answered {}: {}", reply.status, reply.body);
    let post = Post {
        asked_at,
        answered_at: tick(),
        key: None,
        text: text.to_owned(),
        recipients: vec![to.to_owned()],
        answer: Answer::Accepted(posted_message_id(&reply)?),
    };
    Ok((reply, post))
}

/// Sends with an idempotency key and retries at these gateways after a lost connection or a 5xx.
pub async fn send_keyed(apis: &[Api], target: &Target, text: &str) -> Result<SentMessage> {
    keyed(apis.iter().cycle(), target, text, &uuid::Uuid::new_v4().to_string()).await
}

/// Repeats an accepted request with its idempotency key, at one gateway. The answer may name another message.
pub async fn repeat_keyed(api: &Api, sent: &SentMessage) -> Result<SentMessage> {
    let key = sent.key.as_deref().context("no idempotency key")?;
    keyed(std::iter::repeat(api), &sent.target, &sent.text, key).await
}

/// Sends at two gateways concurrently with one idempotency key, like a client with a short timeout. Both must answer
/// with the same message.
pub async fn send_twice(apis: &[Api; 2], target: &Target, text: &str) -> Result<SentMessage> {
    let key = uuid::Uuid::new_v4().to_string();
    let [first, second] = apis;
    let (one, other) = tokio::try_join!(
        keyed([first, second].into_iter().cycle(), target, text, &key),
        keyed([second, first].into_iter().cycle(), target, text, &key),
    )?;
    ensure!(one.outcome == other.outcome, "{text} was accepted as {:?} and as {:?}", one.outcome, other.outcome);
    Ok(one)
}

async fn keyed<'a>(apis: impl Iterator<Item = &'a Api>, target: &Target, text: &str, key: &str) -> Result<SentMessage> {
    let (path, body) = target.request(text);
    let (started, asked_at) = (Instant::now(), tick());
    for (attempts, api) in (1..).zip(apis) {
        match api.without_retries().call(Method::POST, &path, Some(body.clone()), &[("Idempotency-Key", key)]).await {
            Ok(reply) if reply.is_success() => {
                let outcome = Outcome::Accepted(posted_message_id(&reply)?);
                return Ok(SentMessage {
                    text: text.to_owned(),
                    target: target.clone(),
                    outcome,
                    attempts,
                    ticks: (asked_at, tick()),
                    key: Some(key.to_owned()),
                });
            }
            Ok(reply) if reply.status < 500 => bail!("{text} was refused with {}: {}", reply.status, reply.body),
            Ok(reply) if started.elapsed() > RETRY_TIMEOUT => bail!("{text}: still {} {}", reply.status, reply.body),
            Err(error) if started.elapsed() > RETRY_TIMEOUT => bail!("{text}: still no answer: {error:#}"),
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
    bail!("no gateway to send to")
}

/// Message sent like a published client, with the failures on the way.
#[derive(Clone, Debug)]
pub struct ClientSend {
    pub sent: SentMessage,
    /// Number of 5xx answers.
    pub server_errors: u64,
    /// Number of attempts without an answer.
    pub no_answers: u64,
}

/// Sends with an idempotency key as published clients do: up to four attempts, each at the next gateway. A message that
/// is not accepted by then is an error.
pub async fn send_as_client(gateways: impl Iterator<Item = Api>, target: &Target, text: &str) -> Result<ClientSend> {
    let (path, body) = target.request(text);
    let key = uuid::Uuid::new_v4().to_string();
    let (mut server_errors, mut no_answers, mut met) = (0, 0, Vec::new());
    let (mut pauses, asked_at) = (CLIENT_PAUSES.iter(), tick());
    for (attempts, api) in (1..).zip(gateways) {
        match api.without_retries().call(Method::POST, &path, Some(body.clone()), &[("Idempotency-Key", &key)]).await {
            Ok(reply) if reply.is_success() => {
                let outcome = Outcome::Accepted(posted_message_id(&reply)?);
                let sent = SentMessage {
                    text: text.to_owned(),
                    target: target.clone(),
                    outcome,
                    attempts,
                    ticks: (asked_at, tick()),
                    key: Some(key),
                };
                return Ok(ClientSend { sent, server_errors, no_answers });
            }
            Ok(reply) if reply.status < 500 => bail!("{text} was refused with {}: {}", reply.status, reply.body),
            Ok(reply) => {
                server_errors += 1;
                met.push(format!("{} {}", reply.status, reply.body));
            }
            Err(error) => {
                no_answers += 1;
                met.push(format!("{error:#}"));
            }
        }
        let Some(pause) = pauses.next() else { bail!("{text} was given up after {met:?}") };
        tokio::time::sleep(*pause).await;
    }
    bail!("no gateway to send to")
}

/// Returns the id of a posted message; both answers contain it at the top level.
pub fn posted_message_id(reply: &Reply) -> Result<String> {
    reply.data()["id"].as_str().map(str::to_owned).with_context(|| format!("no id in {}", reply.body))
}
