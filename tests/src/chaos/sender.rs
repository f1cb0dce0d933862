//! REST senders that know what they were told.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use relay_testkit::client::{Api, Reply};
use reqwest::Method;
use serde_json::json;

/// How long a keyed message is tried.
const TRY_FOR: Duration = Duration::from_secs(90);
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// What a published client waits before its second, third and fourth try. The shortest of the three clients' (Python's).
const CLIENT_PAUSES: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];

/// What a sender knows of a message in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A 2xx, with this message id.
    Accepted(String),
    /// Nothing but statuses of 4xx or 5xx.
    Refused(u16),
    /// A connection ended without a status.
    Unknown,
}

/// A message and what became of it.
#[derive(Clone, Debug)]
pub struct Sent {
    /// Its unique text.
    pub text: String,
    /// Who shall get it.
    pub recipients: Vec<String>,
    /// What the sender was told.
    pub outcome: Outcome,
    /// How often it was tried.
    pub tries: u32,
}

/// Where a message goes.
#[derive(Clone, Debug)]
pub enum Target {
    /// An agent, by name.
    Dm(String),
    /// A channel, by name, with the members that are not the sender.
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

/// Sends once, without a key: what comes back is final.
pub async fn send_once(api: &Api, target: &Target, text: &str) -> Result<Sent> {
    let (path, body) = target.request(text);
    let outcome = match api.impatient().post(&path, body).await {
        Ok(reply) if reply.is_success() => Outcome::Accepted(id_of(&reply)?),
        Ok(reply) => Outcome::Refused(reply.status),
        Err(_) => Outcome::Unknown,
    };
    Ok(Sent { text: text.to_owned(), recipients: target.recipients(), outcome, tries: 1 })
}

/// Sends with an idempotency key, again and again at these gateways after a lost connection or a 5xx.
pub async fn send_keyed(apis: &[Api], target: &Target, text: &str) -> Result<Sent> {
    keyed(apis.iter().cycle(), target, text, &uuid::Uuid::new_v4().to_string()).await
}

/// Sends at two gateways at once with one key, as a client does that gives up waiting too early: both must
/// be told of the same message.
pub async fn send_twice(apis: &[Api; 2], target: &Target, text: &str) -> Result<Sent> {
    let key = uuid::Uuid::new_v4().to_string();
    let [first, second] = apis;
    let (one, other) = tokio::try_join!(
        keyed([first, second].into_iter().cycle(), target, text, &key),
        keyed([second, first].into_iter().cycle(), target, text, &key),
    )?;
    ensure!(one.outcome == other.outcome, "{text} was accepted as {:?} and as {:?}", one.outcome, other.outcome);
    Ok(one)
}

async fn keyed<'a>(apis: impl Iterator<Item = &'a Api>, target: &Target, text: &str, key: &str) -> Result<Sent> {
    let (path, body) = target.request(text);
    let started = Instant::now();
    for (tries, api) in (1..).zip(apis) {
        match api.impatient().call(Method::POST, &path, Some(body.clone()), &[("Idempotency-Key", key)]).await {
            Ok(reply) if reply.is_success() => {
                let outcome = Outcome::Accepted(id_of(&reply)?);
                return Ok(Sent { text: text.to_owned(), recipients: target.recipients(), outcome, tries });
            }
            Ok(reply) if reply.status < 500 => bail!("{text} was refused with {}: {}", reply.status, reply.body),
            Ok(reply) if started.elapsed() > TRY_FOR => bail!("{text}: still {} {}", reply.status, reply.body),
            Err(error) if started.elapsed() > TRY_FOR => bail!("{text}: still no answer: {error:#}"),
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(TRY_AGAIN_AFTER).await;
    }
    bail!("no gateway to send to")
}

/// A message that a published client sent, with what the client met on the way.
#[derive(Clone, Debug)]
pub struct AsClient {
    /// The message.
    pub sent: Sent,
    /// Answers of 5xx.
    pub server_errors: u64,
    /// Tries without an answer.
    pub no_answers: u64,
}

/// Sends with an idempotency key as published clients do: four tries at most, each at the next of these gateways.
/// A message that is not accepted by then is an error.
pub async fn send_as_client(gateways: impl Iterator<Item = Api>, target: &Target, text: &str) -> Result<AsClient> {
    let (path, body) = target.request(text);
    let key = uuid::Uuid::new_v4().to_string();
    let (mut server_errors, mut no_answers, mut met) = (0, 0, Vec::new());
    let mut pauses = CLIENT_PAUSES.iter();
    for (tries, api) in (1..).zip(gateways) {
        match api.impatient().call(Method::POST, &path, Some(body.clone()), &[("Idempotency-Key", &key)]).await {
            Ok(reply) if reply.is_success() => {
                let outcome = Outcome::Accepted(id_of(&reply)?);
                let sent = Sent { text: text.to_owned(), recipients: target.recipients(), outcome, tries };
                return Ok(AsClient { sent, server_errors, no_answers });
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

/// The id of a posted message: flat in both answers.
pub fn id_of(reply: &Reply) -> Result<String> {
    reply.data()["id"].as_str().map(str::to_owned).with_context(|| format!("no id in {}", reply.body))
}
