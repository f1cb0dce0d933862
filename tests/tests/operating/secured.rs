//! An installation as docs/operations/install.md describes it: users of NATS with the subjects of their role, and TLS
//! to Postgres and NATS with certificates that are checked.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use async_nats::{ConnectOptions, Event};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use relay_acceptance::relayctl::relayctl_with;
use relay_testkit::{
    binaries,
    client::{Api, NodeSocket, ObserverSocket},
    ports::Port,
    servers::Nats,
    stack::{Backends, Service, ServiceSpec, Stack},
    wait,
};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::mpsc;

const SOON: Duration = Duration::from_secs(30);
/// As in deploy/compose.yaml.
const PASSWORDS: [(&str, &str); 3] = [
    ("RELAY_NATS_GATEWAY_PASSWORD", "gateway-password"),
    ("RELAY_NATS_WORKER_PASSWORD", "worker-password"),
    ("RELAY_NATS_ADMIN_PASSWORD", "admin-password"),
];

/// Returns the configuration of NATS that compose uses.
fn nats_config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/nats/nats.conf")
}

/// Returns the URL of a role.
fn url_of(role: &str, scheme: &str, nats: &Nats) -> String {
    format!("{scheme}://relay-{role}:{role}-password@{}", nats.address())
}

/// Postgres with the schema, NATS with users, and the processes that connect to them.
struct Installation {
    // Dropped before the servers.
    services: Vec<Service>,
    nats: Nats,
    stack: Stack,
}

impl Installation {
    async fn start(nats_flags: &[&str]) -> Result<Self> {
        let stack = Stack::builder().gateways(0).worker(false).start().await?;
        Self::over(stack, nats_flags).await
    }

    async fn over(stack: Stack, nats_flags: &[&str]) -> Result<Self> {
        let dir = stack.state_dir().join("secured-nats");
        let nats = Nats::start_configured(&dir, &nats_config(), nats_flags, &PASSWORDS).await?;
        Ok(Self { services: Vec::new(), nats, stack })
    }

    /// Starts a gateway or a worker without waiting for it, and returns its index.
    fn add(&mut self, role: &str, backends: &Backends, variables: &[(&str, String)]) -> Result<usize> {
        let name = format!("{role}-{}", self.services.len());
        let mut env = vec![("RELAY_FILES_DIR".to_owned(), self.stack.state_dir().join("files").display().to_string())];
        env.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let program = binaries::find(&binaries::directory()?, &format!("relay-{role}"))?;
        let log = self.stack.state_dir().join(format!("{name}.log"));
        let spec = ServiceSpec { name: &name, program, backends, env: &env, log };
        let (main, metrics) = (Port::free()?, Port::free()?);
        let service = match role {
            "gateway" => Service::gateway(&spec, &main.address(), &metrics.address())?,
            _ => Service::worker(&spec, &metrics.address())?,
        };
        self.services.push(service.with_reserved_ports([main, metrics]));
        Ok(self.services.len() - 1)
    }

    async fn start_all(&mut self, scheme: &str, database_url: &str, variables: &[(&str, String)]) -> Result<()> {
        for role in ["gateway", "gateway", "worker"] {
            let nats_url = url_of(role, scheme, &self.nats);
            self.add(role, &Backends { database_url: database_url.to_owned(), nats_url }, variables)?;
        }
        for service in &self.services {
            service.wait_ready().await?;
            wait::until_ok("a connection to NATS", SOON, || async {
                ensure!(service.metric("relay_nats_connected").await? > 0.0, "{}", service.log_tail(5));
                anyhow::Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Sends a delivery, an event, an invocation and a probe from the first gateway to the second: all arrive live.
    async fn use_everything(&self) -> Result<()> {
        let (first, second) = (self.services[0].url(), self.services[1].url());
        let key = Api::create_workspace(first, "secured").await?;
        let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let ann = key.as_agent(&ann);
        let mut at_bob = key.as_agent(&bob).at(second).direct_socket().await?;
        let mut observer = ObserverSocket::open(second, key.token()).await?;
        ann.dm("bob", "hello").await?.success()?;
        at_bob.expect_where("the message", SOON, |frame| frame["payload"]["data"]["text"] == "hello").await?;
        ann.post_message("general", "seen").await?.success()?;
        observer.next_of("message.created", SOON).await?;

        let token = key.create_broker_node("node_builder", "builder").await?;
        let register = |instance: &str| {
            json!({
                "v": 1, "type": "node.register", "name": "builder", "node_id": token.node_id, "max_agents": 0,
                "capabilities": [{ "name": "build", "kind": "action" }], "tags": [], "version": "test/1",
                "provider": { "name": "default", "instance_id": instance },
            })
        };
        let mut builder = NodeSocket::connect(&self.services[1].ws_url(), &token.token).await?;
        builder.request(register("one")).await?;
        ann.post("/v1/actions/build/invoke", json!({ "input": {} })).await?.success()?;
        builder.expect("action.invoke").await?;
        // The second gateway proves that the first provider lives.
        let mut rival = NodeSocket::connect(&self.services[0].ws_url(), &token.token).await?;
        let refused = rival.request(register("two")).await.err().context("a live provider was replaced")?;
        ensure!(refused.to_string().contains("provider_instance"), "{refused}");

        for name in ["relay_nats_unverified_total", "relay_deliveries_repaired_total", "relay_events_repaired_total"] {
            ensure!(self.services[1].metric(name).await? == 0.0, "{name}");
        }
        Ok(())
    }

    fn nats_log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.stack.state_dir().join("secured-nats/nats.log"))?)
    }
}

/// Connects as a role and returns the errors that the server reports.
async fn connect_as(nats: &Nats, role: &str) -> Result<(async_nats::Client, mpsc::Receiver<String>)> {
    let (sender, errors) = mpsc::channel(64);
    let options = ConnectOptions::new().event_callback(move |event| {
        let sender = sender.clone();
        async move {
            if let Event::ServerError(error) = event {
                let _ = sender.send(error.to_string()).await;
            }
        }
    });
    let options = options.user_and_password(format!("relay-{role}"), format!("{role}-password"));
    Ok((options.connect(nats.url()).await?, errors))
}

/// Returns the subjects among these that a role may not publish on.
async fn refused_subjects(nats: &Nats, role: &str, subjects: &[&str]) -> Result<Vec<String>> {
    let (client, mut errors) = connect_as(nats, role).await?;
    for subject in subjects {
        client.publish((*subject).to_owned(), "forged".into()).await?;
    }
    client.flush().await?;
    client.publish("end.of.test", "".into()).await?;
    let mut refused = Vec::new();
    loop {
        let error = tokio::time::timeout(SOON, errors.recv()).await?.context("the connection ended")?;
        if error.contains("end.of.test") {
            return Ok(refused);
        }
        let subject = subjects.iter().find(|subject| error.contains(&format!("\"{subject}\"")));
        refused.push((*subject.with_context(|| error.clone())?).to_owned());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_of_nats_may_do_what_it_needs_and_no_more() -> Result<()> {
    let mut installation = Installation::start(&[]).await?;
    let database_url = installation.stack.database_url().to_owned();
    installation.start_all("nats", &database_url, &[]).await?;
    installation.use_everything().await?;
    let nats = &installation.nats;
    let admin = url_of("admin", "nats", nats);
    let variables = [("DATABASE_URL", database_url.as_str()), ("NATS_URL", admin.as_str())];
    let findings = relayctl_with(&["--json", "doctor"], &variables, "").await?.json()?;
    for check in ["security", "jetstream log", "jetstream bounds"] {
        let all = findings.as_array().context("findings")?;
        let found = all.iter().find(|finding| finding["check"] == check).context("a finding")?;
        assert_eq!(found["verdict"], "ok", "{found}");
    }
    relayctl_with(&["restore", "--dry-run"], &variables, "").await?.expect_success()?;
    let log = installation.nats_log()?;
    ensure!(!log.contains("Violation"), "a role lacks a permission: {log}");

    let forbidden = ["live.d.0.1.1", "live.e.0.1", "_INBOX.a.b", "$JS.API.STREAM.DELETE.RELAY_EVENTS"];
    let of_gateways = ["relay.probe.1", "relay.live.1"];
    let hints = ["relay.hints", "relay.hints.1"];
    assert_eq!(refused_subjects(nats, "gateway", &[&forbidden[..], &hints, &of_gateways].concat()).await?, forbidden);
    let of_worker = [&forbidden[..], &of_gateways].concat();
    assert_eq!(refused_subjects(nats, "worker", &[&of_worker[..], &hints].concat()).await?, of_worker);
    let of_admin = [&of_worker[..], &hints].concat();
    assert_eq!(refused_subjects(nats, "admin", &of_admin).await?, of_admin);

    // What tenants write does not pass through a worker's account.
    let (worker, mut errors) = connect_as(nats, "worker").await?;
    let _copies = worker.subscribe("relay.live.>").await?;
    let error = tokio::time::timeout(SOON, errors.recv()).await?.context("an error")?;
    ensure!(error.contains("relay.live.>"), "{error}");
    ensure!(async_nats::connect(nats.url()).await.is_err(), "a client without a password was accepted");
    Ok(())
}

/// Private authority that signs certificates of servers.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: &Path, name: &str) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let dir = dir.join(name);
        fs::create_dir_all(&dir)?;
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        fs::write(dir.join("ca.pem"), issuer.pem())?;
        Ok(Self { issuer, dir })
    }

    fn ca_file(&self) -> String {
        self.dir.join("ca.pem").display().to_string()
    }

    /// Returns the files of a certificate for a host and of its key, in `dir`.
    fn issue(&self, host: &str, dir: &Path) -> Result<(PathBuf, PathBuf)> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![host.to_owned()])?.signed_by(&key, &self.issuer)?;
        let (certificate_file, key_file) = (dir.join(format!("{host}.pem")), dir.join(format!("{host}.key")));
        fs::write(&certificate_file, certificate.pem())?;
        fs::write(&key_file, key.serialize_pem())?;
        fs::set_permissions(&key_file, fs::Permissions::from_mode(0o600))?;
        Ok((certificate_file, key_file))
    }

    /// Has Postgres use a certificate for `host`.
    async fn certify_postgres(&self, stack: &Stack, host: &str) -> Result<()> {
        let mut server = PgConnection::connect(&stack.postgres().url()).await?;
        let data: String = sqlx::query_scalar("SHOW data_directory").fetch_one(&mut server).await?;
        let (certificate, key) = self.issue(host, Path::new(&data))?;
        let owner = fs::metadata(&data)?;
        for file in [&certificate, &key] {
            chown(file, Some(owner.uid()), Some(owner.gid()))?;
        }
        for (setting, value) in [("ssl_cert_file", certificate), ("ssl_key_file", key), ("ssl", "on".into())] {
            let statement = format!("ALTER SYSTEM SET {setting} = '{}'", value.display());
            sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut server).await?;
        }
        sqlx::raw_sql("SELECT pg_reload_conf()").execute(&mut server).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_encrypted_to_servers_that_prove_their_names() -> Result<()> {
    let stack = Stack::builder().gateways(0).worker(false).start().await?;
    let dir = stack.state_dir().to_owned();
    let (authority, stranger) = (Authority::new(&dir, "authority")?, Authority::new(&dir, "stranger")?);
    authority.certify_postgres(&stack, "127.0.0.1").await?;
    let (certificate, key) = authority.issue("127.0.0.1", &dir)?;
    let (certificate, key) = (certificate.display().to_string(), key.display().to_string());
    let mut installation = Installation::over(stack, &["--tls", "--tlscert", &certificate, "--tlskey", &key]).await?;
    let plain = installation.stack.database_url().to_owned();
    let verified = |authority: &Authority| format!("{plain}?sslmode=verify-full&sslrootcert={}", authority.ca_file());
    let secure = [
        ("RELAY_NATS_CA_FILE", authority.ca_file()),
        ("RELAY_REQUIRE_SECURE", "on".to_owned()),
        ("RELAY_SECRET_KEYS", "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned()),
        ("RELAY_SIGNING_SECRET", "0123456789abcdef0123456789abcdef".to_owned()),
    ];
    installation.start_all("tls", &verified(&authority), &secure).await?;
    installation.use_everything().await?;
    let mut server = PgConnection::connect(&plain).await?;
    let unencrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                        WHERE application_name = 'relay' AND NOT ssl";
    assert_eq!(sqlx::query_scalar::<_, i64>(unencrypted).fetch_one(&mut server).await?, 0);

    // A server with a certificate of another authority, or for another host, gets nothing.
    let admin = url_of("admin", "tls", &installation.nats);
    let doctor = async |database_url: String, ca_file: String| {
        let variables =
            [("DATABASE_URL", database_url.as_str()), ("NATS_URL", &admin), ("RELAY_NATS_CA_FILE", &ca_file)];
        anyhow::Ok(relayctl_with(&["doctor"], &variables, "").await?.stdout)
    };
    let healthy = doctor(verified(&authority), authority.ca_file()).await?;
    ensure!(healthy.contains("ok    nats version") && healthy.contains("ok    postgres version"), "{healthy}");
    let suspicious = doctor(verified(&stranger), stranger.ca_file()).await?;
    for line in ["FAIL  postgres", "warn  nats"] {
        let found = suspicious.lines().find(|found| found.starts_with(line)).context("a finding")?;
        ensure!(found.contains("UnknownIssuer"), "{suspicious}");
    }
    authority.certify_postgres(&installation.stack, "db.example").await?;
    wait::until_ok("Postgres to use another certificate", SOON, || async {
        let report = doctor(verified(&authority), authority.ca_file()).await?;
        ensure!(report.contains("FAIL  postgres") && report.contains("not valid for name"), "{report}");
        anyhow::Ok(())
    })
    .await?;

    // A gateway waits for the right server, and says why.
    let nats_url = url_of("gateway", "tls", &installation.nats);
    let backends = Backends { database_url: verified(&authority), nats_url };
    let gateway = installation.add("gateway", &backends, &secure)?;
    wait::until_ok("the gateway to refuse Postgres", SOON, || async {
        let log = installation.services[gateway].log_tail(20);
        ensure!(log.contains("not valid for name"), "{log}");
        anyhow::Ok(())
    })
    .await?;
    ensure!(!installation.services[gateway].is_ready().await, "a gateway is ready without Postgres");

    // Without NATS a gateway serves from Postgres.
    authority.certify_postgres(&installation.stack, "127.0.0.1").await?;
    let of_stranger = [&secure[1..], &[("RELAY_NATS_CA_FILE", stranger.ca_file())]].concat();
    let gateway = installation.add("gateway", &backends, &of_stranger)?;
    let gateway = &installation.services[gateway];
    gateway.wait_ready().await?;
    ensure!(gateway.metric("relay_nats_connected").await? == 0.0, "a stranger's NATS was accepted");
    ensure!(fs::read_to_string(gateway.log())?.contains("nats connection failed"), "{}", gateway.log_tail(5));
    Ok(())
}
