//! Notes that an agent saves for a later session.

use anyhow::{Result, ensure};
use relay_testkit::wait;
use serde_json::json;

use crate::scene::{SOON, Scene};

#[tokio::test]
async fn a_note_right_before_the_end_is_kept_for_the_next_agent() -> Result<()> {
    let scene = Scene::new("notes").await?;
    let script = "printf 'KIND: continuity\\nACTION: save\\n\\nHalf of it is done.\\n'";
    let body = json!({ "name": "first", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    wait::until_ok("the end", SOON, || async {
        let exited = scene.broker.events("first", "agent_exited").await?;
        ensure!(exited.len() == 1, "{exited:?}");
        anyhow::Ok(())
    })
    .await?;
    let agent = scene.spawn_with("second", "screen", &[], json!({ "continueFrom": "first", "task": "go on" })).await?;
    wait::until_ok("the notes", SOON, || async {
        let messages = agent.messages();
        ensure!(messages.iter().any(|(_, text)| text.contains("Half of it is done.")), "{messages:?}");
        anyhow::Ok(())
    })
    .await
}
