//! A flood of invented tokens: Postgres hears of few, and other callers are served.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use anyhow::{Result, ensure};
use futures::future::join_all;
use relay_testkit::{
    client::{Api, Reply},
    stack::Stack,
};
use reqwest::Method;
use serde_json::json;

const SECRET: &str = "a-bootstrap-secret-of-the-tests-0123456789";
const ATTACKER: &str = "198.51.100.7";
/// Unknown tokens of an address that are looked up in a minute.
const LOOKUPS_PER_MINUTE: f64 = 60.0;
const GUESSES_PER_MINUTE: usize = 60;
const AT_A_TIME: usize = 32;
/// Requests of each other caller during the flood.
const REQUESTS: usize = 40;

async fn lookups(stack: &Stack, outcome: &str) -> Result<f64> {
    let label = format!("relay_token_lookups_total{{outcome=\"{outcome}\"}} ");
    let page = stack.gateway(0).metrics().await?;
    let sample = page.lines().find_map(|line| line.strip_prefix(&label));
    Ok(sample.map(str::parse).transpose()?.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_invented_tokens_refuses_no_other_caller() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_RATE_LIMITS", "on")
        .env("RELAY_TRUSTED_PROXIES", "127.0.0.1")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "other").await?;
    let neighbour = Api::create_workspace(gateway, "neighbour").await?;
    let anonymous = Api::anonymous(gateway).without_retries();
    let ask = async |api: &Api, address: &str| {
        api.call(Method::GET, "/v1/agents", None, &[("x-forwarded-for", address)]).await
    };
    ask(&neighbour, ATTACKER).await?.success()?;

    let is_over = AtomicBool::new(false);
    let flood = async {
        let attackers = (0..AT_A_TIME).map(async |_| {
            let (mut unknown, mut refused) = (0_usize, 0_usize);
            while !is_over.load(Ordering::Relaxed) {
                let invented = anonymous.with_token(&format!("rk_live_{}", uuid::Uuid::new_v4().simple()));
                match ask(&invented, ATTACKER).await?.status {
                    401 => unknown += 1,
                    429 | 503 => refused += 1,
                    other => anyhow::bail!("answered {other}"),
                }
            }
            Ok((unknown, refused))
        });
        let counts = join_all(attackers).await.into_iter().collect::<Result<Vec<_>>>()?;
        anyhow::Ok(counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1)))
    };
    let others = async {
        let mut served = Ok(());
        for _ in 0..REQUESTS {
            let other = ask(&key, "198.51.100.8").await.and_then(Reply::success);
            // A caller at the attacker's address that was valid before the flood.
            let neighbour = ask(&neighbour, ATTACKER).await.and_then(Reply::success);
            served = other.and(neighbour).map(drop);
            if served.is_err() {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        served
    };
    let began = Instant::now();
    let (flood, served) = tokio::join!(flood, others);
    served?;
    let (unknown, refused) = flood?;
    let minutes = (began.elapsed().as_secs_f64() / 60.0).ceil();
    ensure!(refused > 0 && unknown > 0, "{unknown} unknown, {refused} refused");
    let looked_up = lookups(&stack, "unknown").await?;
    ensure!(looked_up <= LOOKUPS_PER_MINUTE * (minutes + 1.0), "{looked_up} look-ups in Postgres");
    Ok(())
}

/// One token, refused again and again, is read once a second.
#[tokio::test]
async fn a_repeated_unknown_token_is_not_read_again() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let stale = Api::anonymous(stack.gateway(0).url()).with_token("at_live_00000000000000000000000000000000");
    let began = Instant::now();
    for _ in 0..100 {
        stale.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    }
    let (read, repeated) = (lookups(&stack, "unknown").await?, lookups(&stack, "repeated").await?);
    assert!((read + repeated - 100.0).abs() < 0.5, "{read} read, {repeated} repeated");
    ensure!(read <= began.elapsed().as_secs_f64() + 2.0, "{read} read");
    Ok(())
}

/// Guesses of the bootstrap secret count like unknown tokens, whether or not the installation is hosted.
#[tokio::test]
async fn an_address_cannot_guess_the_bootstrap_secret() -> Result<()> {
    let guess = [("x-workspace-bootstrap-secret", "a guess"), ("x-forwarded-for", ATTACKER)];
    for hosted in ["on", "off"] {
        let stack = Stack::builder()
            .gateways(1)
            .worker(false)
            .env("RELAY_RATE_LIMITS", "on")
            .env("RELAY_TRUSTED_PROXIES", "127.0.0.1")
            .env("RELAY_HOSTED", hosted)
            .env("RELAY_BOOTSTRAP_SECRET", SECRET)
            .start()
            .await?;
        let anonymous = Api::anonymous(stack.gateway(0).url()).without_retries();
        let create = async |headers: &[(&str, &str)]| {
            anonymous.call(Method::POST, "/v1/workspaces", Some(json!({ "name": "w" })), headers).await
        };
        for _ in 0..GUESSES_PER_MINUTE {
            create(&guess).await?;
        }
        let right = [("x-workspace-bootstrap-secret", SECRET), ("x-forwarded-for", ATTACKER)];
        create(&right).await?.refused(429, "rate_limit_exceeded")?;
        let elsewhere = [("x-workspace-bootstrap-secret", SECRET), ("x-forwarded-for", "198.51.100.8")];
        create(&elsewhere).await?.success()?;
    }
    Ok(())
}
