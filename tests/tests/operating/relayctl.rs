//! `relayctl` as a process with direct access to Postgres and NATS, beside running gateways.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::relayctl::{relayctl, relayctl_with};
use relay_testkit::{client::Api, shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

async fn id_of(key: &Api) -> Result<String> {
    let workspace = key.get("/v1/workspace").await?.success()?;
    Ok(text(&workspace["id"]).to_owned())
}

#[tokio::test]
async fn a_created_workspace_works_and_a_revoked_key_does_not() -> Result<()> {
    let base = shared().await.any_gateway();
    let made = relayctl(&["--json", "workspace", "create", "by hand"]).await?.json()?;
    let id = text(&made["workspace_id"]);
    let first = Api::new(base, text(&made["api_key"]));
    let ann = first.register_agent("ann").await?;
    first.as_agent(&ann).post_message("general", "hello").await?.success()?;

    let second = relayctl(&["--json", "token", "create", "--workspace", id]).await?.json()?;
    let second = first.with_token(text(&second["api_key"]));
    assert_eq!(id_of(&second).await?, id_of(&first).await?);

    relayctl_with(&["token", "revoke"], &[], second.token()).await?.expect_success()?;
    wait::until_ok("the key to be dead", SOON, || async {
        second.get("/v1/workspace").await?.refused(401, "unauthorized").map(drop)
    })
    .await?;
    first.get("/v1/workspace").await?.success()?;
    let again = relayctl_with(&["token", "revoke"], &[], second.token()).await?;
    assert!(!again.success && again.stderr.contains("no such token"), "{}", again.stderr);

    // The token of an agent too; requests authenticated before are refused at the commit.
    let killed = relayctl_with(&["--json", "token", "revoke"], &[], &ann.token).await?.json()?;
    assert_eq!((text(&killed["kind"]), text(&killed["agent"])), ("agent", "ann"));
    wait::until_ok("the token to be dead", SOON, || async {
        let refused = first.as_agent(&ann).post_message("general", "still here?").await?;
        refused.refused(401, "agent_token_invalid").map(drop)
    })
    .await?;

    let listed = relayctl(&["--json", "workspace", "list", "--name", "by hand", "--limit", "1000"]).await?.json()?;
    let own = listed.as_array().context("a list")?.iter().find(|row| row["workspace_id"] == id);
    assert_eq!(own.context("it is listed")?["agents"], 1);
    let table = relayctl(&["workspace", "list", "--name", "by hand", "--limit", "1000"]).await?.expect_success()?;
    assert!(table.stdout.contains("CONNECTED") && table.stdout.contains(id), "{}", table.stdout);
    Ok(())
}

#[tokio::test]
async fn a_created_workspace_has_the_default_plan_of_the_installation() -> Result<()> {
    let hosted = ("RELAY_HOSTED", "on");
    for (arguments, variables, expected) in [
        (&[][..], &[][..], "enterprise"),
        (&[], &[("RELAY_HOSTED", "off")], "enterprise"),
        (&[], &[hosted], "free"),
        (&["--hosted", "on"], &[], "free"),
        (&[], &[hosted, ("RELAY_DEFAULT_PLAN", "pro")], "pro"),
        (&["--plan", "enterprise"], &[hosted, ("RELAY_DEFAULT_PLAN", "pro")], "enterprise"),
    ] {
        let create = [&["--json", "workspace", "create", "planned"], arguments].concat();
        let made = relayctl_with(&create, variables, "").await?.json()?;
        let quotas = relayctl(&["--json", "workspace", "quotas", text(&made["workspace_id"])]).await?.json()?;
        assert_eq!(quotas["plan"], expected, "{arguments:?} {variables:?}");
    }
    Ok(())
}

/// Creates a workspace with rows in many tables, all containing the same word.
async fn create_workspace_with_data(base: &str, word: &str) -> Result<Api> {
    let key = Api::create_workspace(base, word).await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    let (as_ada, as_bob) = (key.as_agent(&ada), key.as_agent(&bob));
    let posted = as_ada.post_message("general", &format!("{word} for @bob")).await?.success()?;
    as_bob
        .post(&format!("/v1/messages/{}/reactions", text(&posted["id"])), json!({ "emoji": "thumbsup" }))
        .await?
        .success()?;
    as_bob.post_empty(&format!("/v1/messages/{}/read", text(&posted["id"]))).await?.success()?;
    as_ada.dm("bob", &format!("{word} in private")).await?.success()?;
    key.post("/v1/webhooks", json!({ "channel": "general", "name": word })).await?.success()?;
    let observer = json!({ "name": word, "scopes": ["stream:read"] });
    key.post("/v1/observer-tokens", observer).await?.success()?;
    key.create_broker_node(&format!("node_{}", &uuid::Uuid::new_v4().simple().to_string()[..18]), "box").await?;
    let file = json!({ "filename": "a.txt", "content_type": "text/plain", "size_bytes": 4 });
    as_ada.post("/v1/files/upload", file).await?.success()?;
    let mut socket = as_bob.direct_socket().await?;
    socket.expect("deliver").await?;
    let _ = socket.close().await;
    Ok(key)
}

#[tokio::test]
async fn erasing_a_workspace_removes_all_of_its_data_and_no_other() -> Result<()> {
    let base = shared().await.any_gateway();
    let (gone, stays) =
        (create_workspace_with_data(base, "ephemeral").await?, create_workspace_with_data(base, "neighbour").await?);
    let (gone_id, stays_id) = (id_of(&gone).await?, id_of(&stays).await?);
    let before = rows_of(&stays_id).await?;
    assert!(before.len() > 12, "the neighbour has rows in {before:?} only");

    let alive = relayctl(&["workspace", "delete", "no-id"]).await?;
    assert!(!alive.success && alive.stderr.contains("is no id"), "{}", alive.stderr);

    let folder = tempfile::tempdir()?;
    let file = folder.path().join("export.jsonl");
    relayctl(&["workspace", "export", &gone_id, "--output", &file.display().to_string()]).await?.expect_success()?;
    let exported = std::fs::read_to_string(&file)?;
    assert!(exported.contains("ephemeral for @bob") && exported.contains("ephemeral in private"));
    assert!(!exported.contains("neighbour"), "rows of another workspace are in the export");
    for line in exported.lines() {
        let row: Value = serde_json::from_str(line)?;
        assert!(
            row["table"] != "tokens" && row["row"]["workspace_id"] == gone_id.parse::<i64>().unwrap_or_default(),
            "{line}"
        );
    }
    let twice = relayctl(&["workspace", "export", &gone_id, "--output", &file.display().to_string()]).await?;
    assert!(!twice.success, "an export was overwritten");

    let erased =
        relayctl(&["--json", "workspace", "delete", &gone_id, "--erase", "--wait-seconds", "45"]).await?.json()?;
    assert_eq!(erased["left"], json!([]));
    assert!(erased["looked_at"].as_u64() > Some(30), "{erased}");
    let proof = erased["proof"].as_array().context("a proof")?;
    assert!(proof.iter().all(|place| place["rows"] == 0), "{erased}");
    for place in ["workspaces", "tokens", "mailbox_heads", "jetstream", "files"] {
        assert!(proof.iter().any(|looked| looked["table"] == place), "nobody looked at {place}: {erased}");
    }
    assert!(erased["purged"].as_u64() >= Some(1), "JetStream had frames of it: {erased}");
    let rows = |table: &str| {
        let found = erased["erased"].as_array()?.iter().find(|row| row["table"] == table)?;
        found["rows"].as_u64()
    };
    // The third agent is the hidden author of webhook messages.
    assert_eq!((rows("workspaces"), rows("messages"), rows("agents")), (Some(1), Some(2), Some(3)), "{erased}");
    assert_eq!(rows_of(&gone_id).await?, Vec::<(String, i64)>::new(), "a table still knows the workspace");
    wait::until_ok("its key to be dead", SOON, || async {
        gone.get("/v1/workspace").await?.refused(401, "unauthorized").map(drop)
    })
    .await?;
    let again = relayctl(&["workspace", "export", &gone_id]).await?;
    assert!(!again.success && again.stderr.contains("not found"), "{}", again.stderr);
    let again = relayctl(&["workspace", "delete", &gone_id, "--erase"]).await?.expect_success()?.stdout;
    assert!(
        again.contains("there is no workspace") && again.contains(&format!("nothing of workspace {gone_id}")),
        "{again}"
    );
    let unknown = relayctl(&["workspace", "delete", &gone_id]).await?;
    assert!(!unknown.success && unknown.stderr.contains("not found"), "{}", unknown.stderr);

    let mut after = rows_of(&stays_id).await?;
    after.retain(|(table, _)| before.iter().any(|(known, _)| known == table));
    for ((table, then), (_, now)) in before.iter().zip(&after) {
        assert!(now >= then || table == "idempotency_keys", "{table} of the neighbour lost rows: {then} to {now}");
    }
    stays.get("/v1/workspace").await?.success()?;
    Ok(())
}

#[tokio::test]
async fn an_erasure_without_nats_is_reported_as_incomplete_and_can_be_repeated() -> Result<()> {
    let key = create_workspace_with_data(shared().await.any_gateway(), "half erased").await?;
    let id = id_of(&key).await?;
    let erase = ["--json", "workspace", "delete", &id, "--erase", "--wait-seconds", "45"];
    let away = relayctl_with(&erase, &[("NATS_URL", "nats://127.0.0.1:9")], "").await?;
    assert!(!away.success && away.stderr.contains("can be repeated"), "{}", away.stderr);
    assert!(rows_of(&id).await?.len() > 5, "nothing goes before NATS has answered");

    // Everything except the row by which the workspace is found.
    let blind = relayctl_with(&erase, &[("NATS_URL", "")], "").await?;
    assert!(!blind.success && blind.stderr.contains("JetStream was not looked at"), "{}", blind.stderr);
    let printed: Value = serde_json::from_str(&blind.stdout)?;
    let left = json!([{ "table": "workspaces", "rows": 1 }, { "table": "jetstream", "rows": null }]);
    assert_eq!((&printed["left"], &printed["purged"]), (&left, &Value::Null), "{printed}");
    assert_eq!(rows_of(&id).await?, [("workspaces".to_owned(), 1)]);
    let words = relayctl_with(&erase[1..], &[("NATS_URL", "")], "").await?;
    assert!(
        !words.stdout.contains("nothing of workspace") && words.stdout.contains("not looked at"),
        "{}",
        words.stdout
    );

    let done = relayctl(&erase).await?.json()?;
    assert_eq!((&done["left"], &done["was_there"]), (&json!([]), &json!(true)), "{done}");
    assert_eq!(rows_of(&id).await?, []);
    Ok(())
}

#[tokio::test]
async fn quotas_set_by_relayctl_apply_at_gateways() -> Result<()> {
    let made = relayctl(&["--json", "workspace", "create", "with quotas"]).await?.json()?;
    let id = text(&made["workspace_id"]);
    let set = ["--json", "workspace", "quotas", id, "--plan", "pro", "--set", "agents=1", "--set", "mailbox_depth=7"];
    let expected = json!({ "workspace_id": id, "plan": "pro", "own": { "agents": 1, "mailbox_depth": 7 } });
    assert_eq!(relayctl(&set).await?.json()?, expected);
    for (wrong, why) in [
        (["--set", "agent=5"], "unknown field"),
        (["--set", "mailbox_depth=0"], "between 1 and 100000"),
        (["--plan", "gold"], "free, pro or enterprise"),
    ] {
        let refused = relayctl(&[&["workspace", "quotas", id], &wrong[..]].concat()).await?;
        assert!(!refused.success && refused.stderr.contains(why), "{}", refused.stderr);
    }

    let key = Api::new(shared().await.any_gateway(), text(&made["api_key"]));
    key.register_agent("ann").await?;
    let second = key.post("/v1/agents", json!({ "name": "bob", "type": "agent" })).await?;
    second.refused(429, "plan_limit_exceeded")?;

    let shown = relayctl(&["workspace", "quotas", id, "--unset", "agents"]).await?.expect_success()?.stdout;
    assert_eq!(shown.lines().collect::<Vec<_>>(), ["plan pro", "mailbox_depth 7", "everything else as the plan says"]);
    Ok(())
}

/// Returns the tables with rows of a workspace and their counts, read from the catalog by the test itself.
async fn rows_of(id: &str) -> Result<Vec<(String, i64)>> {
    use sqlx::Connection as _;
    let mut database = sqlx::PgConnection::connect(&shared().await.database_url).await?;
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT table_name::text FROM information_schema.columns
          WHERE table_schema = 'public' AND column_name = 'workspace_id' ORDER BY 1",
    )
    .fetch_all(&mut database)
    .await?;
    let mut found = Vec::new();
    for table in tables {
        let query = format!("SELECT count(*) FROM \"{table}\" WHERE workspace_id = {id}");
        let rows: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut database).await?;
        if rows > 0 {
            found.push((table, rows));
        }
    }
    Ok(found)
}

#[tokio::test]
async fn a_migration_reports_machine_readable_results() -> Result<()> {
    assert_eq!(relayctl(&["--json", "migrate"]).await?.json()?, json!({ "up_to_date": true }));
    Ok(())
}

#[tokio::test]
async fn a_workspace_is_found_by_name_only_if_the_name_is_unique() -> Result<()> {
    let name = format!("twins {}", uuid::Uuid::new_v4().simple());
    let first = relayctl(&["--json", "workspace", "create", &name]).await?.json()?;
    relayctl(&["node", "list", "--workspace", &name]).await?.expect_success()?;
    relayctl(&["workspace", "create", &name]).await?.expect_success()?;
    let both = relayctl(&["node", "list", "--workspace", &name]).await?;
    assert!(!both.success && both.stderr.contains("several workspaces"), "{}", both.stderr);
    relayctl(&["workspace", "delete", text(&first["workspace_id"])]).await?.expect_success()?;
    relayctl(&["node", "list", "--workspace", &name]).await?.expect_success()?;
    let nobody = relayctl(&["node", "list", "--workspace", "nobody has this name"]).await?;
    assert!(!nobody.success && nobody.stderr.contains("not found"), "{}", nobody.stderr);
    Ok(())
}

#[tokio::test]
async fn mailbox_and_node_positions_are_shown() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "inspected").await?;
    let id = id_of(&key).await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    for number in 1..=3 {
        key.as_agent(&ada).dm("bob", &format!("letter {number}")).await?.success()?;
    }
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    socket.auto_ack(false);
    for _ in 0..3 {
        socket.expect("deliver").await?;
    }
    socket.ack("bob", 2).await?;
    let mailbox = wait::until_ok("the ack to be stored", SOON, || async {
        let mailbox = relayctl(&["--json", "mailbox", "inspect", "--workspace", &id, "bob"]).await?.json()?;
        ensure!(mailbox["ack_floor"] == 2, "{mailbox}");
        Ok::<_, anyhow::Error>(mailbox)
    })
    .await?;
    assert_eq!(
        (&mailbox["next_seq"], &mailbox["settled_floor"], &mailbox["connected"]),
        (&json!(4), &json!(2), &json!(true))
    );
    assert_eq!(mailbox["holes"], json!([]));
    let seqs: Vec<_> =
        mailbox["frames"].as_array().context("frames")?.iter().map(|frame| frame["seq"].as_i64()).collect();
    assert_eq!(seqs, [Some(3), Some(2), Some(1)]);
    assert_eq!(mailbox["frames"][0]["beginning"], "letter 3");
    let printed = relayctl(&["mailbox", "inspect", "--workspace", &id, "bob"]).await?.expect_success()?.stdout;
    assert!(printed.contains("waiting        1") && printed.contains("holes          none"), "{printed}");

    let nodes = relayctl(&["--json", "node", "list", "--workspace", &id]).await?.json()?;
    let bobs = nodes.as_array().context("nodes")?.iter().filter(|node| node["live"] == true).count();
    assert_eq!(bobs, 1, "{nodes}");
    let letters = relayctl(&["dead-letter", "list", "--workspace", &id]).await?.expect_success()?.stdout;
    assert_eq!(letters.trim(), "there are no dead letters");
    let nobody = relayctl(&["mailbox", "inspect", "--workspace", &id, "cleo"]).await?;
    assert!(!nobody.success && nobody.stderr.contains("cleo not found"), "{}", nobody.stderr);
    Ok(())
}

#[tokio::test]
async fn doctor_passes_on_a_healthy_stack_and_fails_without_servers() -> Result<()> {
    let findings = relayctl(&["--json", "doctor"]).await?.json()?;
    let findings = findings.as_array().context("findings")?;
    let failed: Vec<_> = findings.iter().filter(|finding| finding["verdict"] == "fail").collect();
    assert!(failed.is_empty(), "{failed:?}");
    for check in [
        "postgres fsync",
        "postgres replication",
        "schema",
        "partitions",
        "gateways",
        "recovery",
        "nats version",
        "jetstream republish",
        "jetstream bounds",
        "jetstream log",
    ] {
        let found = findings.iter().find(|finding| finding["check"] == check);
        assert_eq!(found.with_context(|| format!("{check} was not looked at"))?["verdict"], "ok", "{check}");
    }
    // A single server keeps one copy, and the finding says so.
    let copies = findings.iter().find(|finding| finding["check"] == "jetstream copies").context("copies")?;
    assert_eq!(copies["verdict"], "warn");

    let nothing = [("DATABASE_URL", "postgres://127.0.0.1:9/none"), ("NATS_URL", "nats://127.0.0.1:9")];
    let done = relayctl_with(&["doctor"], &nothing, "").await?;
    assert!(!done.success, "{}", done.stdout);
    assert!(done.stdout.contains("FAIL  postgres") && done.stdout.contains("-> start Postgres"), "{}", done.stdout);
    assert!(done.stdout.contains("warn  nats"), "{}", done.stdout);
    Ok(())
}

#[tokio::test]
async fn tail_shows_past_and_new_deliveries() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "tailed").await?;
    let ada = key.register_agent("ada").await?;
    key.as_agent(&ada).post_message("general", "first words").await?.success()?;
    let gateway = [("RELAY_BASE_URL", base), ("RELAY_API_KEY", key.token())];
    let tail = ["tail", "--since", "0", "--type", "message.", "--count", "1"];
    let shown = relayctl_with(&tail, &gateway, "").await?.expect_success()?.stdout;
    assert!(shown.contains("message.created") && shown.contains("first words"), "{shown}");
    let (shown, ()) = tokio::try_join!(
        async {
            let tail = ["--json", "tail", "--since", "0", "--grep", "second words", "--count", "1"];
            relayctl_with(&tail, &gateway, "").await?.json()
        },
        async {
            key.as_agent(&ada).post_message("general", "second words").await?.success()?;
            Ok(())
        }
    )?;
    assert!(shown.to_string().contains("second words"), "{shown}");
    let wrong = [("RELAY_BASE_URL", base), ("RELAY_API_KEY", "rk_live_00000000000000000000000000000000")];
    let refused = relayctl_with(&["tail"], &wrong, "").await?;
    assert!(!refused.success && refused.stderr.contains("401"), "{}", refused.stderr);
    Ok(())
}

#[tokio::test]
async fn the_configuration_is_checked_as_a_whole_and_explained_without_secrets() -> Result<()> {
    let wrong =
        [("RELAY_LISTEN", "here"), ("RELAY_DATABASE_CONNECTIONS", "many"), ("RELAY_TRUSTED_PROXIES", "10.0.0.0/8,x")];
    let checked = relayctl_with(&["config", "check", "gateway"], &wrong, "").await?;
    assert!(!checked.success);
    for (variable, _) in wrong {
        assert!(checked.stderr.contains(variable), "{variable}: {}", checked.stderr);
    }
    let together = [("RELAY_HOSTED", "on"), ("NATS_URL", "http://nats:4222"), ("RELAY_SIGNING_SECRET", "short")];
    let checked = relayctl_with(&["config", "check", "gateway"], &together, "").await?;
    for (variable, _) in together {
        assert!(!checked.success && checked.stderr.contains(variable), "{variable}: {}", checked.stderr);
    }
    let empty = [("RELAY_SIGNING_SECRET", ""), ("RELAY_NATS_REPLICAS", ""), ("RELAY_FILES_S3_BUCKET", "")];
    relayctl_with(&["config", "check", "gateway"], &empty, "").await?.expect_success()?;
    relayctl(&["config", "check", "gateway"]).await?.expect_success()?;
    relayctl(&["config", "check", "worker"]).await?.expect_success()?;
    let usable = relayctl(&["--json", "config", "check", "gateway"]).await?.json()?;
    assert_eq!(usable, json!({ "usable": true, "wrong": [] }));
    let unusable = relayctl_with(&["--json", "config", "check", "gateway"], &wrong, "").await?;
    let printed: Value = serde_json::from_str(&unusable.stdout)?;
    assert!(!unusable.success && printed["wrong"].as_array().is_some_and(|wrong| wrong.len() == 3), "{printed}");
    let settings = relayctl(&["--json", "config", "explain", "worker"]).await?.json()?;
    let of = |name: &str| settings["settings"].as_array()?.iter().find(|setting| setting["name"] == name);
    let database = of("DATABASE_URL").context("DATABASE_URL is explained")?;
    assert_eq!((&database["from"], &database["value"]), (&json!("DATABASE_URL"), &Value::Null), "{database}");

    let folder = tempfile::tempdir()?;
    let (settings, secret) = (folder.path().join("relay.toml"), folder.path().join("secret"));
    std::fs::write(&settings, "listen = \"127.0.0.1:0\"\nhosted = true\ntrusted_proxies = [\"10.0.0.0/8\"]\n")?;
    std::fs::write(&secret, "0123456789abcdef0123456789abcdef\n")?;
    let (settings, secret) = (settings.display().to_string(), secret.display().to_string());
    let files = [("RELAY_CONFIG", settings.as_str()), ("RELAY_BOOTSTRAP_SECRET_FILE", secret.as_str())];
    let printed = relayctl_with(&["config", "explain", "gateway"], &files, "").await?.expect_success()?.stdout;
    assert!(printed.contains("RELAY_LISTEN\n    127.0.0.1:0  from RELAY_CONFIG"), "{printed}");
    assert!(printed.contains("RELAY_BOOTSTRAP_SECRET\n    (not shown)  from RELAY_BOOTSTRAP_SECRET_FILE"), "{printed}");
    assert!(!printed.contains("0123456789abcdef"), "{printed}");
    Ok(())
}

#[tokio::test]
async fn the_database_url_can_be_read_from_a_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (url, none) = (folder.path().join("url"), folder.path().join("none"));
    std::fs::write(&url, format!("{}\n", shared().await.database_url))?;
    let (url, none) = (url.display().to_string(), none.display().to_string());
    let by_file = [("DATABASE_URL", ""), ("DATABASE_URL_FILE", url.as_str())];
    relayctl_with(&["workspace", "list"], &by_file, "").await?.expect_success()?;
    let missing = [("DATABASE_URL", ""), ("DATABASE_URL_FILE", none.as_str())];
    let refused = relayctl_with(&["workspace", "list"], &missing, "").await?;
    assert!(!refused.success && refused.stderr.contains("DATABASE_URL_FILE"), "{}", refused.stderr);
    let both = relayctl_with(&["workspace", "list"], &[("DATABASE_URL_FILE", url.as_str())], "").await?;
    assert!(!both.success && both.stderr.contains("both set"), "{}", both.stderr);
    Ok(())
}

#[tokio::test]
async fn shell_completions_are_generated() -> Result<()> {
    for shell in ["bash", "zsh", "fish"] {
        let script = relayctl(&["completions", shell]).await?.expect_success()?.stdout;
        assert!(script.contains("relayctl") && script.contains("dead-letter"), "{shell}: {script}");
    }
    Ok(())
}
