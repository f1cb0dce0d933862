//! Rate limits: they hold across gateways, one caller cannot exhaust a workspace's limit, the headers report them, and
//! refused requests have no effect.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use relay_testkit::client::{Agent, Api, Reply};
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use reqwest::Method;
use serde_json::json;

/// Requests per minute of every workspace in these tests.
const LIMIT: usize = 240;
/// Units that one gateway may spend before it acquires any: a 32nd of the limit.
const ADVANCE: usize = LIMIT / 32 + 1;
/// Maximum duration of a scenario within its minute, in seconds.
const SECONDS_NEEDED: i64 = 40;
/// Number of retries of a measurement that ran beyond its minute.
const MINUTES: usize = 4;
/// Maximum `Retry-After` in seconds of a caller that is too fast or of a stalled storage; an exhausted limit gives the
/// end of the minute.
const SOON: i64 = 5;

async fn stack() -> Result<Stack> {
    let plans = json!({ "enterprise": { "requests_per_minute": LIMIT } });
    Stack::builder()
        .env("RELAY_RATE_LIMITS", "on")
        .env("RELAY_PLANS", plans.to_string())
        .env("RELAY_TRUSTED_PROXIES", "127.0.0.1, 10.0.0.0/8")
        .start()
        .await
}

fn header(reply: &Reply, name: &str) -> Result<i64> {
    let value = reply.headers.get(name).with_context(|| format!("no {name} in {:?}", reply.headers))?;
    Ok(value.to_str()?.parse()?)
}

/// Returns limit, remaining and reset of an answer.
fn limit_headers(reply: &Reply) -> Result<(i64, i64, i64)> {
    Ok((
        header(reply, "x-ratelimit-limit")?,
        header(reply, "x-ratelimit-remaining")?,
        header(reply, "x-ratelimit-reset")?,
    ))
}

fn unix_seconds() -> i64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs().cast_signed()
}

/// Asserts an error in the envelope with all headers for a retry.
fn is_refusal(reply: &Reply) -> Result<()> {
    ensure!(reply.status == 429 && reply.code() == "rate_limit_exceeded", "{} {}", reply.status, reply.body);
    let (_, remaining, reset) = limit_headers(reply)?;
    let retry_after = header(reply, "retry-after")?;
    ensure!(remaining == 0 && (1..=60).contains(&retry_after), "{:?}", reply.headers);
    // Some seconds may have passed since the answer.
    ensure!((-20..=2).contains(&(reset - unix_seconds() - retry_after)), "{:?}", reply.headers);
    Ok(())
}

/// Returns whether the request was refused with a short `Retry-After`.
fn comes_back_shortly(reply: &Reply) -> Result<bool> {
    Ok(matches!(reply.status, 429 | 503) && header(reply, "retry-after")? < SOON)
}

/// Repeats a request, as clients do, while the answer has a short `Retry-After`.
async fn call(api: &Api, method: Method, path: &str, body: Option<serde_json::Value>) -> Result<Reply> {
    loop {
        let reply = api.call(method.clone(), path, body.clone(), &[]).await?;
        if !comes_back_shortly(&reply)? {
            return Ok(reply);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Creates a workspace at the start of its minute with this many agents; returns the end of the minute in unix seconds.
async fn workspace(stack: &Stack, name: &str, agents: usize) -> Result<(Api, Vec<Agent>, i64)> {
    let key = Api::create_workspace(stack.gateway(0).url(), name).await?;
    // This request is charged to another bucket.
    let mut ends_at = header(&key.get("/v1/workspace").await?, "x-ratelimit-reset")?;
    ensure!((0..=61).contains(&(ends_at - unix_seconds())), "a minute that ends at {ends_at}");
    if ends_at - unix_seconds() < SECONDS_NEEDED {
        let over = || async { unix_seconds() > ends_at };
        wait::until("the workspace's next minute", Duration::from_secs(90), over).await;
        ends_at += 60;
    }
    let mut registered = Vec::new();
    for number in 0..agents {
        registered.push(key.register_agent(&format!("agent-{number}")).await?);
    }
    Ok((key, registered, ends_at))
}

/// Sends requests until one is refused and returns the number of charged ones. Until `at_least` were charged, it
/// retries after a short `Retry-After`.
async fn ask_until_refused(api: &Api, path: &str, at_least: usize) -> Result<usize> {
    let mut charged = 0;
    loop {
        let reply = api.get(path).await?;
        // A request that storage failed after its admission is charged too; only then does a 503 have the headers.
        if reply.is_success() || (reply.status == 503 && reply.headers.contains_key("x-ratelimit-remaining")) {
            charged += 1;
            ensure!(charged <= 10 * LIMIT, "never refused");
            continue;
        }
        if charged < at_least && comes_back_shortly(&reply)? {
            tokio::time::sleep(Duration::from_millis(500)).await;
            continue;
        }
        is_refusal(&reply)?;
        return Ok(charged);
    }
}

#[tokio::test]
async fn rate_limits_hold_across_gateways() -> Result<()> {
    let stack = stack().await?;
    tokio::try_join!(
        check_workspace_limit(&stack),
        check_caller_limit(&stack),
        check_headers_and_costs(&stack),
        check_refused_posts_have_no_effect(&stack),
        check_price_of_batches(&stack),
        check_lookups_by_address(&stack),
    )?;
    Ok(())
}

/// Eight agents on two gateways get the whole limit, plus at most the advance of each gateway.
async fn check_workspace_limit(stack: &Stack) -> Result<()> {
    const AGENTS: usize = 8;
    for _ in 0..MINUTES {
        let (key, agents, ends_at) = workspace(stack, "together", AGENTS).await?;
        let apis = agents.iter().flat_map(|agent| {
            stack.gateways().iter().map(|gateway| key.as_agent(agent).at(gateway.url())).collect::<Vec<_>>()
        });
        let asking: Vec<_> = apis.collect();
        let asked = asking.iter().map(|api| ask_until_refused(api, "/v1/agent", LIMIT));
        let charged = futures::future::try_join_all(asked).await?;
        let (others, same) = (key.get("/v1/workspace").await?, key.get("/v1/agents").await?);
        if unix_seconds() >= ends_at - SOON {
            continue;
        }
        let total = charged.iter().sum::<usize>() + AGENTS;
        ensure!(total <= LIMIT + 2 * ADVANCE, "{total} requests of {LIMIT}: {charged:?}");
        ensure!(total >= LIMIT - 2, "{total} requests of {LIMIT}: {charged:?}");
        ensure!(others.is_success(), "other budgets are not touched: {}", others.body);
        return is_refusal(&same);
    }
    anyhow::bail!("in {MINUTES} minutes the budget of one could not be used up")
}

/// One agent that floods both gateways gets half of the limit.
async fn check_caller_limit(stack: &Stack) -> Result<()> {
    for _ in 0..MINUTES {
        let (key, agents, ends_at) = workspace(stack, "alone", 2).await?;
        let [greedy, modest] = &agents[..] else { anyhow::bail!("two agents") };
        let apis: Vec<_> = stack.gateways().iter().map(|gateway| key.as_agent(greedy).at(gateway.url())).collect();
        let asked = apis.iter().map(|api| ask_until_refused(api, "/v1/agent", LIMIT / 8));
        let total: usize = futures::future::try_join_all(asked).await?.iter().sum();
        let mut left_out = Vec::new();
        for gateway in stack.gateways() {
            let api = key.as_agent(modest).at(gateway.url());
            for _ in 0..LIMIT / 12 {
                let reply = call(&api, Method::GET, "/v1/agent", None).await?;
                left_out.extend((!reply.is_success()).then_some(reply.body));
            }
        }
        if unix_seconds() >= ends_at {
            continue;
        }
        ensure!(total <= LIMIT / 2 + 2 * ADVANCE, "{total} requests of half of {LIMIT}");
        ensure!(total >= LIMIT / 4, "{total} requests: a quarter may come at once");
        ensure!(left_out.is_empty(), "the other agent is served: {left_out:?}");
        return Ok(());
    }
    anyhow::bail!("in {MINUTES} minutes one agent's part could not be used up")
}

async fn check_headers_and_costs(stack: &Stack) -> Result<()> {
    let (key, agents, _) = workspace(stack, "prices", 2).await?;
    let ann = key.as_agent(&agents[0]);
    let budget = i64::try_from(LIMIT)?;
    let text = json!({ "text": "hello" });
    let dm = json!({ "to": agents[1].name, "text": "hello" });
    let group = json!({ "participants": [agents[1].name] });
    for (method, path, body, tenths) in [
        (Method::GET, "/v1/agent", None, 10),
        (Method::POST, "/v1/channels/general/messages", Some(text), 5),
        (Method::POST, "/v1/dm", Some(dm), 5),
        (Method::POST, "/v1/dm/group", Some(group), 3),
        (Method::GET, "/v1/agents/presence", None, 3),
        // An answer that refuses for another reason has the headers too.
        (Method::GET, "/v1/messages/1", None, 10),
    ] {
        let reply = call(&ann, method, path, body).await?;
        let (limit, remaining, reset) = limit_headers(&reply)?;
        ensure!(limit == budget * tenths / 10, "{path}: {limit}");
        ensure!(remaining < limit && remaining > 0, "{path}: {remaining}");
        ensure!((0..=61).contains(&(reset - unix_seconds())), "{path}: {reset}");
    }
    for path in ["/health", "/v1/nothing-here"] {
        let reply = Api::anonymous(key.base()).get(path).await?;
        ensure!(!reply.headers.contains_key("x-ratelimit-limit"), "{path} is not limited");
    }
    Ok(())
}

/// Posts until refused: accepted posts exist, refused ones do not.
async fn check_refused_posts_have_no_effect(stack: &Stack) -> Result<()> {
    let (key, agents, _) = workspace(stack, "posts", 1).await?;
    let ann = key.as_agent(&agents[0]);
    let (mut accepted, mut refused) = (0, 0);
    while refused < 5 {
        let reply = ann.post_message("general", "hello").await?;
        if reply.status == 429 {
            is_refusal(&reply)?;
            refused += 1;
        } else if !comes_back_shortly(&reply)? {
            ensure!(reply.is_success(), "{} {}", reply.status, reply.body);
            accepted += 1;
        }
        ensure!(accepted <= LIMIT, "never refused");
    }
    let pool = sqlx::PgPool::connect(stack.database_url()).await?;
    let stored: i64 = sqlx::query_scalar("SELECT count(*) FROM messages WHERE agent_id = $1")
        .bind(agents[0].id.parse::<i64>()?)
        .fetch_one(&pool)
        .await?;
    ensure!(stored == i64::try_from(accepted)?, "{stored} stored, {accepted} accepted");
    Ok(())
}

/// A batch pays for each of its posts. The posts that are paid for are the first of it.
async fn check_price_of_batches(stack: &Stack) -> Result<()> {
    // An agent may spend a quarter of the limit at once, a post to a channel costs two requests, the batch itself one.
    const AT_ONCE: usize = (LIMIT / 4 - 1) / 2;
    for _ in 0..MINUTES {
        let (key, agents, _) = workspace(stack, "batches", 2).await?;
        let (ann, bob) = (key.as_agent(&agents[0]), key.as_agent(&agents[1]));
        let post = |nth: usize| json!({ "channel": "general", "text": nth.to_string() });
        let messages: Vec<_> = (0..2 * AT_ONCE).map(post).collect();
        let began = Instant::now();
        let reply = ann.post("/v1/messages/batch", json!({ "messages": messages })).await?;
        // A post to a channel comes back each second.
        let back = usize::try_from(began.elapsed().as_secs())? + 1;
        ensure!(reply.status == 200, "{} {}", reply.status, reply.body);
        let outcomes = reply.data()["outcomes"].as_array().context("outcomes")?.clone();
        if outcomes.iter().any(|outcome| outcome["status"] == 503) {
            // Storage was too slow to tell what was left.
            continue;
        }
        let (limit, remaining, _) = limit_headers(&reply)?;
        ensure!(limit == i64::try_from(LIMIT / 2)? && remaining == 0, "of the last post: {:?}", reply.headers);
        let accepted = outcomes.iter().take_while(|outcome| outcome["status"] == 201).count();
        ensure!((AT_ONCE..=AT_ONCE + back).contains(&accepted), "{accepted} posts of {AT_ONCE} and {back}");
        for outcome in &outcomes[accepted..] {
            let error = &outcome["error"];
            ensure!(outcome["status"] == 429 && error["code"] == "rate_limit_exceeded", "{outcome}");
            ensure!(error["retry_after"].as_u64().is_some_and(|seconds| (1..=60).contains(&seconds)), "{outcome}");
        }
        let rows = call(&bob, Method::GET, "/v1/deliveries?limit=200", None).await?.success()?;
        ensure!(rows.as_array().context("a list")?.len() == accepted, "{accepted} accepted, delivered: {rows}");
        return Ok(());
    }
    anyhow::bail!("storage was slow {MINUTES} times")
}

/// A stalled storage never reports an exhausted limit.
#[tokio::test]
async fn a_stalled_database_does_not_cause_rate_limit_errors() -> Result<()> {
    let plans = json!({ "enterprise": { "requests_per_minute": LIMIT } });
    let stack = Stack::builder()
        .env("RELAY_RATE_LIMITS", "on")
        .env("RELAY_PLANS", plans.to_string())
        .through_proxies(true)
        .start()
        .await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "stalled").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    ann.get("/v1/channels").await?.success()?;
    stack.postgres_proxy().blackhole();
    let asked = futures::future::join_all((0..2 * ADVANCE).map(|_| ann.get("/v1/channels"))).await;
    stack.postgres_proxy().restore();
    for reply in asked {
        let reply = reply?;
        ensure!(reply.status == 503 && reply.code() == "database_overloaded", "{} {}", reply.status, reply.body);
        ensure!(comes_back_shortly(&reply)?, "{:?}", reply.headers);
    }
    Ok(())
}

/// A request that waits for units that then cannot be acquired spends those that the outage allows.
#[tokio::test]
async fn requests_that_wait_for_a_failed_acquisition_are_served() -> Result<()> {
    /// With the one before them they need more units than an agent has in advance, and no more than a batch of them.
    const WAITING: usize = 6;
    /// Bound of the wait for units.
    const PATIENCE: Duration = Duration::from_secs(1);
    let stack = stack().await?;
    let pool = sqlx::PgPool::connect(stack.database_url()).await?;
    for _ in 0..MINUTES {
        let (key, agents, ends_at) = workspace(&stack, "failing", 1).await?;
        let ann = key.as_agent(&agents[0]).without_retries();
        ann.get("/v1/channels").await?.success()?;
        // Acquisitions wait for this transaction, after which their table is not found.
        let mut renaming = pool.begin().await?;
        sqlx::query("ALTER TABLE rate_budgets RENAME TO renamed_budgets").execute(&mut *renaming).await?;
        let began = Instant::now();
        let asked = futures::future::try_join_all((0..WAITING).map(|_| ann.get("/v1/channels")));
        let fail = async {
            wait::until("an acquisition to wait", Duration::from_secs(30), || async {
                let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                                  AND wait_event_type = 'Lock' AND query LIKE 'INSERT INTO rate_budgets%'";
                sqlx::query_scalar::<_, i64>(waiting).fetch_one(&pool).await.is_ok_and(|count| count > 0)
            })
            .await;
            renaming.commit().await
        };
        let (replies, failed) = tokio::join!(asked, fail);
        let took = began.elapsed();
        failed?;
        sqlx::query("ALTER TABLE renamed_budgets RENAME TO rate_budgets").execute(&pool).await?;
        if took >= PATIENCE || unix_seconds() >= ends_at {
            continue;
        }
        for reply in replies? {
            ensure!(reply.is_success(), "{} {}", reply.status, reply.body);
        }
        return Ok(());
    }
    anyhow::bail!("storage was slow {MINUTES} times")
}

async fn check_lookups_by_address(stack: &Stack) -> Result<()> {
    let anonymous = Api::anonymous(stack.gateway(0).url());
    let path = "/v1/workspaces/by-name/nobody-has-this-name";
    let look = |address: &'static str| {
        let anonymous = anonymous.clone();
        async move { anonymous.call(Method::GET, path, None, &[("x-forwarded-for", address)]).await }
    };
    let began = Instant::now();
    let first = look("198.51.100.1").await?;
    ensure!(first.status == 404 && limit_headers(&first)?.0 == 30, "{:?}", first.headers);
    let mut answered = 1_u64;
    while answered < 100 {
        let reply = look("198.51.100.1").await?;
        if reply.status == 429 {
            is_refusal(&reply)?;
            break;
        }
        answered += 1;
    }
    let back = began.elapsed().as_secs() / 2;
    ensure!((30..=30 + back + 1).contains(&answered), "{answered} look-ups, of which one comes back each 2 s: {back}");
    for other in ["198.51.100.2", "198.51.100.1, 203.0.113.5, 10.1.2.3", "2001:db8::1"] {
        ensure!(look(other).await?.status == 404, "{other} has a budget of its own");
    }
    // The proxy's address header is trusted regardless of the client's. With a separate limit it would get 30 lookups.
    for _ in 0..15 {
        let reply = look("203.0.113.77, 198.51.100.1").await?;
        if reply.status == 429 {
            return is_refusal(&reply);
        }
    }
    anyhow::bail!("the first address counted")
}

/// Quotas on a plan that allows two of each resource.
#[tokio::test]
async fn resources_beyond_a_quota_are_not_created() -> Result<()> {
    let plans = json!({ "enterprise": { "agents": 2, "channels": 2, "nodes": 2, "mailbox_depth": 2 } });
    let stack = Stack::builder().env("RELAY_PLANS", plans.to_string()).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "quotas").await?;
    for (path, list) in [("/v1/agents", "/v1/agents"), ("/v1/channels", "/v1/channels"), ("/v1/nodes", "/v1/nodes")] {
        let before = rows(&key, list).await?;
        // Eight concurrent requests on both gateways.
        let asked = (0..8).map(|number| {
            let api = key.at(stack.gateway(number % 2).url());
            async move { api.post(path, json!({ "name": format!("thing-{number}") })).await }
        });
        let replies = futures::future::try_join_all(asked).await?;
        let made = replies.iter().filter(|reply| reply.is_success()).count();
        for refused in replies.iter().filter(|reply| !reply.is_success()) {
            ensure!(refused.status == 429 && refused.code() == "plan_limit_exceeded", "{path}: {}", refused.body);
            ensure!(!refused.headers.contains_key("retry-after"), "coming back does not help");
        }
        ensure!(before + made == 2 && rows(&key, list).await? == 2, "{path}: {before} and {made}");
        // Existing resources are returned, or re-created, as below the quota.
        let number = replies.iter().position(Reply::is_success).context("one was made")?;
        let again = key.post(path, json!({ "name": format!("thing-{number}") })).await?;
        ensure!(again.status == if path == "/v1/nodes" { 201 } else { 409 }, "{path}: {}", again.body);
    }
    // The sender of a third delivery is notified that the mailbox is full.
    let agents = key.get("/v1/agents").await?.success()?;
    let names: Vec<&str> = agents.as_array().context("a list")?.iter().filter_map(|row| row["name"].as_str()).collect();
    let mut clients = Vec::new();
    for name in &names {
        let rotated = key.post(&format!("/v1/agents/{name}/rotate-token"), json!({})).await?.success()?;
        clients.push(key.with_token(rotated["token"].as_str().context("a token")?));
    }
    for number in 0..3 {
        ensure!(clients[0].dm(names[1], &format!("message {number}")).await?.status == 201);
    }
    ensure!(rows(&clients[1], "/v1/deliveries").await? == 2, "the plan's mailboxes take two");
    Ok(())
}

async fn rows(key: &Api, path: &str) -> Result<usize> {
    Ok(key.get(path).await?.success()?.as_array().context("a list")?.len())
}
