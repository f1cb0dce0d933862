//! The conversation of `runners/transcript.jsonl`, to which the runner packages are held as well.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use relay_acceptance::clients;
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::runner::Runner;
use crate::scene::{SOON, Scene};

/// Texts that stand for any text in the transcript, by their names.
#[derive(Default)]
struct Bindings(HashMap<String, Value>);

impl Bindings {
    /// Returns the frame with known texts in place of their names; unknown ones stay.
    fn fill(&self, frame: &Value) -> Value {
        match frame {
            Value::String(name) => self.0.get(name).unwrap_or(frame).clone(),
            Value::Array(values) => values.iter().map(|value| self.fill(value)).collect(),
            Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), self.fill(value))).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => frame.clone(),
        }
    }

    /// Checks a frame against the transcript and learns the texts that stand for any.
    fn check(&mut self, expected: &Value, found: &Value) -> Result<()> {
        match (self.fill(expected), found) {
            (Value::String(name), found) if name.starts_with('$') => {
                self.0.insert(name, found.clone());
                Ok(())
            }
            (Value::Object(fields), Value::Object(others)) => {
                let has_same_keys = fields.len() == others.len() && fields.keys().all(|key| others.contains_key(key));
                ensure!(has_same_keys, "{expected} is expected, {found} came");
                fields.iter().try_for_each(|(key, value)| self.check(value, &others[key]))
            }
            (expected, found) => {
                ensure!(expected == *found, "{expected} is expected, {found} came");
                Ok(())
            }
        }
    }
}

#[tokio::test]
async fn the_broker_speaks_the_transcript() -> Result<()> {
    let scene = Scene::new("transcript").await?;
    scene.broker.wait_connected().await?;
    let mut runner = Runner::connect(&scene).await?;
    let mut bindings = Bindings::default();
    for line in fs::read_to_string(clients::runners().join("transcript.jsonl"))?.lines() {
        let line: Value = serde_json::from_str(line)?;
        match (line["from"].as_str(), line["step"].as_str()) {
            (Some("runner"), _) => runner.send_frame(&bindings.fill(&line["frame"])).await?,
            (Some("broker"), _) => {
                let found = runner.next().await.with_context(|| format!("instead of {line}"))?;
                bindings.check(&line["frame"], &found)?;
            }
            (_, Some("invoke")) => {
                let path = format!("/v1/actions/{}/invoke", line["action"].as_str().context("an action")?);
                let caller = scene.sender.clone();
                wait::until_ok("an invocation", SOON, || async {
                    caller.post(&path, json!({ "input": line["input"] })).await?.success()
                })
                .await?;
            }
            (_, Some("stop")) => {}
            (_, Some("closed")) => ensure!(runner.next().await.is_err(), "the socket is open"),
            _ => bail!("{line} is no line of a transcript"),
        }
    }
    Ok(())
}
