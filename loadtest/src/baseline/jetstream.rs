//! Baselines `js-each` and `js-one`: raw JetStream on the run's own nats-server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::stream::{self, StorageType, Stream};
use async_nats::jetstream::{self, Context, Message};
use futures::{FutureExt, StreamExt, TryStreamExt, stream as futures_stream};
use relay_testkit::servers::Nats;
use tokio::task::JoinSet;

use crate::collector::Collector;
use crate::drive::{Load, drive};
use crate::payload::{push_text, sent_at};
use crate::report::Row;
use crate::usage::Roots;
use crate::window::{Window, measure};

/// `js-one` acks at the latest after this many messages; sooner when no message is waiting.
const ACK_AFTER: u32 = 100;

/// Layout of the consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consumers {
    /// A durable pull consumer for each agent, each message acked.
    Each {
        /// Number of messages per pull request.
        pull: usize,
        /// `true` waits for the server's confirmation of each ack before the next message.
        confirmed: bool,
    },
    /// One durable pull consumer, cumulative acks, dispatched in the client.
    One,
}

impl Consumers {
    fn label(self) -> &'static str {
        match self {
            Self::Each { .. } => "js-each",
            Self::One => "js-one",
        }
    }

    fn how(self) -> String {
        match self {
            Self::Each { pull, confirmed: true } => format!(", pulls of {pull}, acks confirmed"),
            Self::Each { pull, confirmed: false } => format!(", pulls of {pull}"),
            Self::One => String::new(),
        }
    }
}

/// Stream with one subject per agent, and its consumers.
pub(crate) struct JetStream {
    consumers: Consumers,
    agents: usize,
    size: usize,
    publisher: Context,
    stream: Stream,
    pulls: Vec<PullConsumer>,
    roots: Roots,
    collector: Arc<Collector>,
}

impl JetStream {
    /// Creates stream and consumers without consuming.
    pub(crate) async fn create(nats: &Nats, consumers: Consumers, agents: usize, size: usize) -> Result<Self> {
        // Publisher and consumers use separate connections, as separate processes would.
        let publisher = jetstream::new(async_nats::connect(nats.url()).await?);
        let context = jetstream::new(async_nats::connect(nats.url()).await?);
        let name = format!("LOADTEST_{}", consumers.label().replace('-', "_").to_uppercase());
        let _ = context.delete_stream(&name).await;
        let config = stream::Config {
            name: name.clone(),
            subjects: vec![format!("{name}.*")],
            storage: StorageType::File,
            // The server's default is 1000.
            max_consumers: 100_000,
            ..stream::Config::default()
        };
        let stream = context.create_stream(config).await.context("create the stream")?;
        let filters: Vec<(String, String)> = match consumers {
            Consumers::Each { .. } => {
                (0..agents).map(|agent| (format!("c{agent}"), format!("{name}.{agent}"))).collect()
            }
            Consumers::One => vec![("all".to_owned(), format!("{name}.*"))],
        };
        let pulls = filters.into_iter().map(|(durable, filter)| {
            let config = pull::Config {
                durable_name: Some(durable),
                filter_subject: filter,
                ack_policy: match consumers {
                    Consumers::Each { .. } => AckPolicy::Explicit,
                    Consumers::One => AckPolicy::All,
                },
                max_ack_pending: 100_000,
                ..pull::Config::default()
            };
            let (context, name) = (context.clone(), name.clone());
            async move {
                let context = match consumers {
                    // As separate subscribers would: a connection each.
                    Consumers::Each { .. } => jetstream::new(async_nats::connect(nats.url()).await?),
                    Consumers::One => context,
                };
                let stream = context.get_stream(&name).await?;
                anyhow::Ok(stream.create_consumer(config).await?)
            }
        });
        let pulls = futures_stream::iter(pulls).buffered(64).try_collect().await.context("create the consumers")?;
        let roots = Roots::from([("nats".to_owned(), nats.pid())]);
        Ok(Self { consumers, agents, size, publisher, stream, pulls, roots, collector: Arc::default() })
    }

    /// Publishes `load` to the agents in turn while they consume.
    pub(crate) async fn live(&self, label: &str, load: &Load, warm_up: Duration) -> Result<Row> {
        let mut receivers = self.consume();
        let run = format!("{} {label}", self.consumers.label());
        let warm = Load { duration: warm_up, ..load.clone() };
        let warmed = measure(&run, &self.roots, &self.collector, &warm, self.publish()).await;
        let mut row = measure(&run, &self.roots, &self.collector, load, self.publish()).await;
        row.problems.extend(warmed.problems);
        row.notes.push(format!("{} agents{}", self.agents, self.consumers.how()));
        self.finish(&mut receivers, &mut row);
        Ok(row)
    }

    /// Publishes `count` messages first, then measures from the first pull to the last message.
    pub(crate) async fn replay(&self, count: usize) -> Result<Row> {
        let sent = drive(&Load::counted(256, count), &self.collector, self.publish()).await;
        let window = Window::open_for_old(&self.roots, &self.collector);
        let mut receivers = self.consume();
        let missing = self.collector.drain(sent.accepted).await;
        let mut row = window.close(format!("{} replay", self.consumers.label()));
        row.accepted = sent.accepted;
        row.latency = None;
        row.notes.push(format!("{} agents, consumers known before", self.agents));
        if missing > 0 {
            row.problems.push(format!("{missing} messages never came"));
        }
        self.finish(&mut receivers, &mut row);
        Ok(row)
    }

    /// Deletes the stream with its consumers.
    pub(crate) async fn delete(self) -> Result<()> {
        let name = self.stream.cached_info().config.name.clone();
        self.publisher.delete_stream(name).await.context("delete the stream")?;
        Ok(())
    }

    fn publish(
        &self,
    ) -> impl Fn(usize, u64) -> futures::future::BoxFuture<'static, Result<()>> + Clone + Send + Sync + use<> {
        let context = self.publisher.clone();
        let subjects: Arc<[String]> = {
            let name = &self.stream.cached_info().config.name;
            (0..self.agents).map(|agent| format!("{name}.{agent}")).collect()
        };
        let size = self.size;
        move |number, stamp| {
            let (context, subjects) = (context.clone(), Arc::clone(&subjects));
            async move {
                let mut text = String::with_capacity(size);
                push_text(&mut text, stamp, size);
                let subject = subjects[number % subjects.len()].clone();
                context.publish(subject, text.into()).await?.await?;
                Ok(())
            }
            .boxed()
        }
    }

    fn consume(&self) -> JoinSet<Result<()>> {
        let mut receivers = JoinSet::new();
        for consumer in self.pulls.clone() {
            let collector = Arc::clone(&self.collector);
            match self.consumers {
                Consumers::Each { pull, confirmed } => {
                    receivers.spawn(consume_one_agent(consumer, collector, pull, confirmed))
                }
                Consumers::One => receivers.spawn(consume_all(consumer, collector)),
            };
        }
        receivers
    }

    fn finish(&self, receivers: &mut JoinSet<Result<()>>, row: &mut Row) {
        // A receiver that ends by itself has failed.
        while let Some(ended) = receivers.try_join_next() {
            let why = ended.map_or_else(|error| error.to_string(), |result| format!("{result:?}"));
            row.problems.push(format!("a receiver ended: {why}"));
        }
    }
}

async fn consume_one_agent(
    consumer: PullConsumer,
    collector: Arc<Collector>,
    pull: usize,
    confirmed: bool,
) -> Result<()> {
    let mut messages = consumer.stream().max_messages_per_batch(pull).messages().await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        take(&message, &collector);
        match confirmed {
            true => message.double_ack().await.map_err(|error| anyhow!("ack: {error}"))?,
            false => ack(&message).await?,
        }
    }
    Err(anyhow!("the consumer's stream ended"))
}

async fn consume_all(consumer: PullConsumer, collector: Arc<Collector>) -> Result<()> {
    let mut messages = consumer.stream().max_messages_per_batch(2000).messages().await?;
    let mut mailboxes: HashMap<String, u64> = HashMap::new();
    let mut last: Option<Message> = None;
    let mut unacked = 0;
    loop {
        let next = match messages.next().now_or_never() {
            Some(next) => next,
            None => {
                if let Some(message) = last.take() {
                    ack(&message).await?;
                    unacked = 0;
                }
                messages.next().await
            }
        };
        let message = next.context("the consumer's stream ended")??;
        take(&message, &collector);
        // Dispatch: find the agent and count the message.
        match mailboxes.get_mut(message.subject.as_str()) {
            Some(count) => *count += 1,
            None => _ = mailboxes.insert(message.subject.to_string(), 1),
        }
        unacked += 1;
        if unacked >= ACK_AFTER {
            ack(&message).await?;
            unacked = 0;
            last = None;
        } else {
            last = Some(message);
        }
    }
}

fn take(message: &Message, collector: &Collector) {
    let text = std::str::from_utf8(&message.payload).unwrap_or_default();
    collector.delivered(sent_at(text));
}

async fn ack(message: &Message) -> Result<()> {
    message.ack().await.map_err(|error| anyhow!("ack: {error}"))
}
