//! Patterns of triggers that take long to match: they delay the triggers of their own workspace only.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{
    future::try_join_all,
    stream::{self, StreamExt as _, TryStreamExt as _},
};
use relay_acceptance::memory::{peak, reset_peak};
use relay_testkit::{
    client::{Agent, Api},
    stack::Stack,
    wait,
};
use serde_json::json;
use sqlx::PgPool;

use crate::shares::create_family;

const MIB: u64 = 1024 * 1024;
const WORKER_GROWTH: u64 = 128 * MIB;
const PATTERNS: usize = 50;
/// Longest text of a message.
const TEXT_BYTES: usize = 256 * 1024;
/// Messages of the attacker, each of which is matched against all patterns.
const MESSAGES: usize = 10;
const SOON: Duration = Duration::from_secs(60);
/// Bound for another tenant's trigger: a turn of the attacker and the loop's own periods, without optimisations.
const OTHERS_WITHIN: Duration = Duration::from_secs(8);

struct Tenant {
    key: Api,
    ann: Agent,
}

impl Tenant {
    async fn new(gateway: &str, name: &str) -> Result<Self> {
        Self::with_key(Api::create_workspace(gateway, name).await?).await
    }

    async fn with_key(key: Api) -> Result<Self> {
        let ann = key.register_agent("ann").await?;
        key.as_agent(&ann).post("/v1/actions", json!({ "name": "run", "handler_agent": "ann" })).await?.success()?;
        Ok(Self { key, ann })
    }

    fn agent(&self) -> Api {
        self.key.as_agent(&self.ann)
    }

    async fn add_trigger(&self, pattern: &str) -> Result<()> {
        self.agent().post("/v1/triggers", json!({ "action_name": "run", "pattern": pattern })).await?.success()?;
        Ok(())
    }
}

/// Posts messages that match the trigger of a tenant, and checks that it fires soon after each.
async fn ensure_fires_soon(other: &Tenant) -> Result<()> {
    for nth in 0..3 {
        let began = Instant::now();
        let posted = other.agent().post_message("general", &format!("deploy {nth}")).await?.success()?;
        wait::until_ok("the other tenant's trigger", SOON, || async {
            let triggers = other.key.get("/v1/triggers").await?.success()?;
            let fired = triggers[0]["last_triggered_at"].as_str().unwrap_or_default();
            ensure!(fired >= posted["created_at"].as_str().unwrap_or_default(), "{triggers}");
            Ok(())
        })
        .await?;
        ensure!(began.elapsed() < OTHERS_WITHIN, "it fired after {:?}", began.elapsed());
    }
    Ok(())
}

/// Text of two letters in no order, so that an automaton meets ever new states.
fn disordered_text() -> String {
    let mut state: u64 = 1;
    let letter = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if state >> 63 == 0 { 'a' } else { 'b' }
    };
    (0..TEXT_BYTES).map(letter).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patterns_that_take_long_delay_no_other_tenant() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let (attacker, other) = (Tenant::new(gateway, "attacker").await?, Tenant::new(gateway, "other").await?);
    let patterns: Vec<String> = (0..PATTERNS).map(|nth| format!("[ab]*a[ab]{{{}}}c", 3000 + nth)).collect();
    try_join_all(patterns.iter().map(|pattern| attacker.add_trigger(pattern))).await?;
    other.add_trigger("^deploy [0-9]+$").await?;

    let before = reset_peak(stack.worker().pid())?;
    let (poster, text) = (attacker.agent(), disordered_text());
    try_join_all((0..MESSAGES).map(|_| poster.post_message("general", &text))).await?;
    ensure_fires_soon(&other).await?;
    wait::until_ok("the attacker's unmatched triggers", SOON, || async {
        let triggers = attacker.key.get("/v1/triggers").await?.success()?;
        let error = triggers[PATTERNS - 1]["last_error"].as_str().unwrap_or_default();
        ensure!(error.contains("took too long"), "{error:?}");
        Ok(())
    })
    .await?;
    let grown = peak(stack.worker().pid())?.saturating_sub(before);
    ensure!(grown < WORKER_GROWTH, "the worker grew by {} MiB", grown / MIB);
    Ok(())
}

/// Children of the attacker: with it as many workspaces as one tick of a worker scans.
const CHILDREN: usize = 15;
const PATTERNS_OF_MEMBER: usize = 10;
/// Messages of each workspace, each of which is matched for the time that it may take.
const BACKLOG: usize = 3;
const MADE_AT_A_TIME: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_family_with_a_long_backlog_delays_no_other_tenant() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let patterns: Vec<String> = (0..PATTERNS_OF_MEMBER).map(|nth| format!("[ab]*a[ab]{{{}}}c", 3000 + nth)).collect();
    let members: Vec<Tenant> = stream::iter(create_family(gateway, CHILDREN).await?)
        .map(|key| async {
            let member = Tenant::with_key(key).await?;
            for pattern in &patterns {
                member.add_trigger(pattern).await?;
            }
            anyhow::Ok(member)
        })
        .buffered(MADE_AT_A_TIME)
        .try_collect()
        .await?;
    // The newest workspace: a scan that prefers older ones would never reach it.
    let other = Tenant::new(gateway, "other").await?;
    other.add_trigger("^deploy [0-9]+$").await?;

    let text = disordered_text();
    try_join_all(members.iter().map(|member| async {
        for _ in 0..BACKLOG {
            member.agent().post_message("general", &text).await?.success()?;
        }
        anyhow::Ok(())
    }))
    .await?;
    ensure_fires_soon(&other).await?;
    let database = PgPool::connect(stack.database_url()).await?;
    let behind: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM trigger_progress JOIN event_heads USING (workspace_id) WHERE reached_seq < next_seq - 1",
    )
    .fetch_one(&database)
    .await?;
    ensure!(behind > 0, "the attack had ended before");
    Ok(())
}
