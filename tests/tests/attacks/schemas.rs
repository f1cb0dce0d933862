//! Schemas of actions that would take a gateway or a worker down: they are refused when they are defined, and do not
//! affect other tenants when an older version has stored them.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::future::join_all;
use relay_acceptance::chaos::by_run_size;
use relay_testkit::{
    client::{Agent, Api, Reply},
    stack::Stack,
    wait,
};
use serde_json::{Map, Value, json};
use sqlx::{Connection as _, PgConnection};

/// Bound of the other tenant's trigger. The schema of one message ends after 2 s.
const TRIGGERED_WITHIN: Duration = Duration::from_secs(8);
/// Bound of the calls of `/health` during an attack: of all at full size, of nine in ten beside other tests.
const HEALTH_WITHIN: Duration = Duration::from_millis(100);
/// Invocations that an attacker sends at a time.
const AT_A_TIME: usize = 32;

/// Schema of 1.5 kB whose references double forty times: checking anything against it never ends.
fn doubling() -> Value {
    let mut definitions = Map::new();
    definitions.insert("a0".to_owned(), json!({ "type": "object" }));
    for level in 1..=40 {
        let reference = json!({ "$ref": format!("#/$defs/a{}", level - 1) });
        definitions.insert(format!("a{level}"), json!({ "allOf": [reference, reference] }));
    }
    json!({ "$ref": "#/$defs/a40", "$defs": definitions })
}

/// Schema that compares every element with many others, within what may be defined.
fn costly() -> Value {
    json!({ "properties": { "list": { "items": { "enum": (0..2000).collect::<Vec<_>>() } } } })
}

/// Schema whose patterns visit some thousand states for each byte, within what may be defined.
fn patterns() -> Value {
    let patterns: Vec<_> = (0..20).map(|n| json!({ "pattern": format!("[ab]*a[ab]{{{}}}c", 1600 + n) })).collect();
    json!({ "properties": { "text": { "anyOf": patterns } } })
}

/// Calls `/health` until the attack has ended, and checks that the calls do not take long.
#[expect(clippy::print_stdout, reason = "figures of the run")]
async fn watch_health(key: &Api, attack: impl Future<Output = Result<()>>) -> Result<()> {
    let mut attack = pin!(attack);
    let mut took = Vec::new();
    loop {
        let began = Instant::now();
        let healthy = async { anyhow::Ok((key.get("/health").await?.is_success(), began.elapsed())) };
        tokio::select! {
            ended = &mut attack => {
                ended?;
                break;
            }
            reply = healthy => {
                let (is_success, elapsed) = reply?;
                ensure!(is_success, "the gateway is healthy");
                took.push(elapsed);
            }
        }
    }
    took.sort_unstable();
    let p90 = took.get(took.len() * 9 / 10).copied().unwrap_or_default();
    let max = took.last().copied().unwrap_or_default();
    println!("{} calls of /health: p90 {p90:?}, max {max:?}", took.len());
    let (what, measured) = by_run_size(("p90", p90), ("the slowest", max));
    ensure!(measured < HEALTH_WITHIN, "{} calls of /health: {what} took {measured:?}", took.len());
    Ok(())
}

struct Tenant {
    key: Api,
    ann: Agent,
}

impl Tenant {
    async fn new(gateway: &str, name: &str) -> Result<Self> {
        let key = Api::create_workspace(gateway, name).await?;
        let ann = key.register_agent("ann").await?;
        Ok(Self { key, ann })
    }

    async fn define(&self, name: &str, schema: Value) -> Result<Reply> {
        let action = json!({ "name": name, "handler_agent": "ann", "input_schema": schema });
        self.key.as_agent(&self.ann).post("/v1/actions", action).await
    }

    async fn invoke(&self, name: &str, input: Value) -> Result<Reply> {
        self.key.as_agent(&self.ann).post(&format!("/v1/actions/{name}/invoke"), json!({ "input": input })).await
    }
}

#[tokio::test]
async fn a_schema_whose_work_multiplies_is_refused_when_it_is_defined() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let tenant = Tenant::new(stack.gateway(0).url(), "schemas").await?;
    tenant.define("doubling", doubling()).await?.refused(400, "schema_too_complex")?;
    let patterns: Map<_, _> = (0..100).map(|n| (format!("p{n}"), json!({ "pattern": "^a+$" }))).collect();
    tenant.define("patterns", json!({ "properties": patterns })).await?.refused(400, "schema_too_complex")?;
    tenant.define("pattern", json!({ "pattern": r"\p{L}{200}" })).await?.refused(400, "schema_too_complex")?;
    tenant.define("circle", json!({ "allOf": [{ "$ref": "#" }] })).await?.refused(400, "schema_too_complex")?;
    let tree = json!({ "properties": { "left": { "$ref": "#" }, "right": { "$ref": "#" } } });
    tenant.define("tree", tree).await?.success()?;
    tenant.invoke("tree", json!({ "left": { "right": {} } })).await?.success()?;
    Ok(())
}

/// Schemas that an older version has stored, and the costliest allowed ones, run beside others, not before them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_schema_stops_other_tenants() -> Result<()> {
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let (attacker, other) = (Tenant::new(gateway, "attacker").await?, Tenant::new(gateway, "other").await?);
    attacker.define("stored", json!({})).await?.success()?;
    attacker.define("costly", costly()).await?.success()?;
    let words = json!({ "properties": { "word": { "type": "string" } } });
    other.define("plain", words).await?.success()?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    sqlx::query("UPDATE actions SET input_schema = $1 WHERE name = 'stored'")
        .bind(doubling())
        .execute(&mut database)
        .await?;
    attacker.invoke("stored", json!({})).await?.refused(400, "schema_too_complex")?;
    let list: Vec<_> = (0..20_000).collect();
    attacker.invoke("costly", json!({ "list": list })).await?.refused(400, "schema_too_complex")?;
    attacker.define("patterns", patterns()).await?.success()?;
    attacker.invoke("patterns", json!({ "text": "ab" })).await?.refused(400, "invalid_action_input")?;
    let long = json!({ "text": "ab".repeat(300_000) });
    let refused = async {
        for _ in 0..5 {
            attacker.invoke("patterns", long.clone()).await?.refused(400, "schema_too_complex")?;
        }
        Ok(())
    };
    watch_health(&other.key, refused).await?;

    // A trigger applies the schema in the worker, whose loop serves all tenants.
    let trigger = |action: &str| json!({ "action_name": action, "channel": "general" });
    for action in ["stored", "patterns"] {
        attacker.key.as_agent(&attacker.ann).post("/v1/triggers", trigger(action)).await?.success()?;
    }
    other.key.as_agent(&other.ann).post("/v1/triggers", trigger("plain")).await?.success()?;

    let within_limits = json!({ "list": (0..400).collect::<Vec<_>>() });
    let attack = join_all((0..AT_A_TIME).map(|_| attacker.invoke("costly", within_limits.clone())));
    let others = async {
        let invoked = async {
            for _ in 0..5 {
                other.invoke("plain", json!({ "word": "hello" })).await?.success()?;
            }
            Ok(())
        };
        watch_health(&other.key, invoked).await?;
        for _ in 0..5 {
            attacker.key.as_agent(&attacker.ann).post_message("general", &"ab".repeat(15_000)).await?.success()?;
        }
        other.key.as_agent(&other.ann).post_message("general", "go").await?.success()?;
        wait::until_ok("the other tenant's trigger", TRIGGERED_WITHIN, || async {
            let triggers = other.key.get("/v1/triggers").await?.success()?;
            ensure!(triggers[0]["last_triggered_at"].is_string(), "{triggers}");
            Ok(())
        })
        .await
    };
    let (attacked, others) = tokio::join!(attack, others);
    others?;
    for reply in attacked {
        let reply = reply?;
        ensure!(reply.is_success() || reply.status == 503, "{} {}", reply.status, reply.body);
    }
    Ok(())
}
