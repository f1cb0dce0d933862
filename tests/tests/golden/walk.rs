//! Fixture of all chapters: a workspace behind two taps, and requests written on one line.

use anyhow::{Context, Result};
use relay_acceptance::golden::{Recording, Tap, compare};
use relay_testkit::client::{Agent, Api};
use relay_testkit::shared;
use reqwest::Method;
use serde_json::Value;
use uuid::Uuid;

/// A workspace of its own, at two gateways whose traffic is recorded.
pub(crate) struct Walk {
    /// With the workspace's key, at the first gateway.
    pub(crate) key: Api,
    pub(crate) recording: Recording,
    taps: [Tap; 2],
    gateways: [String; 2],
    chapter: &'static str,
    is_ended: bool,
}

impl Walk {
    /// On the shared engine.
    pub(crate) async fn new(chapter: &'static str) -> Result<Self> {
        let gateways = &shared().await.gateways;
        Self::at(chapter, [&gateways[0], &gateways[1]]).await
    }

    pub(crate) async fn at(chapter: &'static str, gateways: [&str; 2]) -> Result<Self> {
        let recording = Recording::new();
        let taps = [recording.tap(gateways[0]).await?, recording.tap(gateways[1]).await?];
        let anyone = Api::anonymous(taps[0].url());
        let made = ask(&anyone, &format!(r#"POST /v1/workspaces {{"name":"golden-{}"}}"#, Uuid::new_v4())).await?;
        let key = anyone.with_token(&text(&made, "/api_key")?);
        Ok(Self { key, recording, taps, gateways: gateways.map(str::to_owned), chapter, is_ended: false })
    }

    /// Registers an agent.
    pub(crate) async fn agent(&self, name: &str) -> Result<(Agent, Api)> {
        let agent = self.key.register_agent(name).await?;
        let api = self.key.as_agent(&agent);
        Ok((agent, api))
    }

    /// Without a token.
    pub(crate) fn anonymous(&self) -> Api {
        Api::anonymous(self.taps[0].url())
    }

    /// The same caller at the second gateway.
    pub(crate) fn there(&self, api: &Api) -> Api {
        api.at(self.taps[1].url())
    }

    /// The same caller beside the recording, for waiting.
    pub(crate) fn aside(&self, api: &Api) -> Api {
        api.at(&self.gateways[0])
    }

    /// Compares all that was recorded with the chapter's file.
    pub(crate) fn end(mut self) -> Result<()> {
        self.is_ended = true;
        compare(self.chapter, &self.recording.transcript())
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        if !self.is_ended {
            // The chapter failed on its way.
            println!("{} ended after:\n{}", self.chapter, self.recording.transcript().join("\n"));
        }
    }
}

/// `POST /path {"json":"body"}`: the body of the answer, whatever its status.
pub(crate) async fn ask(api: &Api, request: &str) -> Result<Value> {
    ask_with(api, request, &[]).await
}

/// The same with headers.
pub(crate) async fn ask_with(api: &Api, request: &str, headers: &[(&str, &str)]) -> Result<Value> {
    let (method, rest) = request.split_once(' ').context("a method")?;
    let (path, body) = rest.split_once(' ').unwrap_or((rest, ""));
    let body = if body.is_empty() { None } else { Some(serde_json::from_str(body).context(body.to_owned())?) };
    Ok(api.call(Method::from_bytes(method.as_bytes())?, path, body, headers).await?.body)
}

/// Several, one after the other.
pub(crate) async fn ask_all(api: &Api, requests: &[&str]) -> Result<()> {
    for request in requests {
        ask(api, request).await?;
    }
    Ok(())
}

/// A string of an answer's data; `path` is a JSON pointer below it.
pub(crate) fn text(answer: &Value, pointer: &str) -> Result<String> {
    let found = answer["data"].pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).with_context(|| format!("no {pointer} in {answer}"))
}
