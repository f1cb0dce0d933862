//! A state directory without room.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use relay_testkit::{shared, wait};
use serde_json::json;

use crate::scene::{SOON, Scene, numbered};

const SKIPPED: &str = "skipped: a file system of its own needs CAP_SYS_ADMIN";

/// Small file system of its own, unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` without the right to mount one.
    fn mount(at: &Path) -> Result<Option<Self>> {
        if !may_mount()? {
            return Ok(None);
        }
        fs::create_dir_all(at)?;
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(at).output()?;
        ensure!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        Ok(Some(Self(at.to_owned())))
    }

    fn fill(&self) -> Result<()> {
        let error = fs::write(self.0.join("filler"), vec![0; 1 << 20]).err().context("the disk has room")?;
        ensure!(error.kind() == std::io::ErrorKind::StorageFull, "{error}");
        Ok(())
    }

    fn free(&self) -> Result<()> {
        Ok(fs::remove_file(self.0.join("filler"))?)
    }
}

/// Returns whether this process has CAP_SYS_ADMIN, bit 21 of its effective capabilities.
fn may_mount() -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).context("no capabilities")?;
    Ok(u64::from_str_radix(mask.trim(), 16)? & (1 << 21) != 0)
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process that ends later may still have it open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test]
async fn an_agent_released_on_a_full_disk_is_not_restored_after_a_crash() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let state = folder.path().join(".agentworkforce/relay");
    let Some(disk) = SmallDisk::mount(&state)? else {
        println!("{SKIPPED}");
        return Ok(());
    };
    let mut scene = Scene::in_folder("full-end", shared().await.any_gateway(), &[], folder).await?;
    for name in ["staying", "leaving"] {
        scene.spawn(name, "cooked", &[]).await?;
    }
    disk.fill()?;
    let released = scene.broker.call("DELETE", "/api/spawned/leaving", None).await?;
    assert_eq!(released.status, 200, "{}", released.body);
    let roster = state.join("state-full-end.json");
    assert!(fs::read_to_string(&roster)?.contains("leaving"), "the disk has room");
    disk.free()?;
    wait::until_ok("the end to be written down", SOON, || async {
        ensure!(!fs::read_to_string(&roster)?.contains("leaving"), "not yet");
        anyhow::Ok(())
    })
    .await?;
    scene.broker.kill_and_restart().await?;
    wait::until_ok("the agent that ran", SOON, || async {
        let names = scene.broker.names().await?;
        ensure!(names == ["staying"], "{names:?}");
        anyhow::Ok(())
    })
    .await
}

/// Messages, more than the last page of the ledger has room for.
const LAST: u32 = 90;

#[tokio::test]
async fn a_full_disk_refuses_new_agents_and_loses_no_message() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let Some(disk) = SmallDisk::mount(&folder.path().join(".agentworkforce/relay"))? else {
        println!("{SKIPPED}");
        return Ok(());
    };
    let mut scene = Scene::in_folder("full", shared().await.any_gateway(), &[], folder).await?;
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    scene.sender.dm("worker", "message-1").await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, 1), 1).await?;

    disk.fill()?;
    let body = json!({ "name": "second", "cli": "cat" });
    let refused = scene.broker.call("POST", "/api/spawn", Some(body.clone())).await?;
    assert_eq!((refused.status, &refused.body["code"]), (500, &json!("internal_error")), "{}", refused.body);
    assert_eq!(scene.broker.names().await?, ["worker"]);
    // The ledger has a page, which takes some more lines.
    for body in numbered(2, LAST) {
        scene.sender.dm("worker", &body).await?.success()?;
    }
    wait::until_ok("the verdicts", SOON, || async {
        let verdicts = scene.broker.events("worker", "delivery_verified").await?;
        ensure!(verdicts.len() == LAST as usize, "{} verdicts", verdicts.len());
        anyhow::Ok(())
    })
    .await?;
    let floor = scene.floor("worker").await?;
    assert!(floor < i64::from(LAST), "an ack waits until the disk has what it rests on");

    disk.free()?;
    scene.wait_for("worker", &agent, &numbered(1, LAST), i64::from(LAST)).await?;
    let third = json!({ "name": "third", "cli": "cat" });
    // 502: the engine took too long to register it.
    wait::until_ok("an agent on the freed disk", SOON, || async {
        let spawned = scene.broker.call("POST", "/api/spawn", Some(third.clone())).await?;
        ensure!(spawned.status == 200, "{} {}", spawned.status, spawned.body);
        anyhow::Ok(())
    })
    .await?;
    scene.broker.kill_and_restart().await?;
    wait::until_ok("the agents that ran", SOON, || async {
        let names = scene.broker.names().await?;
        ensure!(names == ["third", "worker"], "{names:?}");
        anyhow::Ok(())
    })
    .await?;
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!(spawned.status, 200, "the name is free: {}", spawned.body);
    let (next, floor) = (LAST + 1, i64::from(LAST) + 1);
    scene.sender.dm("worker", &format!("message-{next}")).await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, next), floor).await
}
