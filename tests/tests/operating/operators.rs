//! Operators on a hosted installation: creation of workspaces, accepted JWTs, and rotation and retirement of signing
//! keys of observer tokens.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use relay_testkit::{
    client::Api,
    stack::{Stack, StackBuilder},
    wait,
};
use reqwest::Method;
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _},
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const SOON: Duration = Duration::from_secs(30);
const ISSUER: &str = "https://issuer.example";
const AUDIENCE: &str = "relay-operators";
const SECRET: &str = "a-bootstrap-secret-of-the-tests-0123456789";
/// Modulus of a discarded RSA key, and a JWT that it signed for the year 2999.
const RSA_MODULUS: &str = "tsQlT6rJOjc6oTeHLUdKU-RslEKtvtKUUOiQai3Ph7ZSKYNDmvxjZXzt570AggcT39FwhMG3IDA5mjX0Uley4yn1VmiggDQo1mIaCxFDxXMZYymkt0ITX8hKAke2JKmjZ-RJLZgo1dv14k-matsBGhke7y6vPCtUjMJTr7zQYjt1MNP-7JMnra8_u7N9ABvLGdSIjn_9tzyhRgdQoNgrB-LMRGKVFmfhXupm_C1BOsXvaFfBZNxq35spCHp-_eDbz2lT6px-yZ4SdgknTSDV5SfYTt9xndeZgtqikXxsZcyU95Pf1oA8YxMmcxb2vzGMialBrhwW8pM1iy5KfwPYTw";
const RSA_TOKEN: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiYXVkIjoicmVsYXktb3BlcmF0b3JzIiwic3ViIjoib3BzIiwiZXhwIjozMjQ3MjE0NDAwMH0.diUGIEG-PK63PSUIoLAIRhtxbns3-aSgsth02OqNCEJvlLuey--T4HstLY8kcuK1kAgQbTB1SWdFGBUZIpRqJAf6YJ7XapRTFlr4JB_8OU349WfvUttbO2lInZRiJUj8PkipoNj_EVsa0AGgPoEEEktfrfyz6Kx5gJlpryPag3UKgoS8fGEK7iBGsFHLgtMeHKz3Wn1fcsflgicdItURq6_U-930VweGvGlxKlsRmyBmmGLBeAE4L1iIN7IYRgqtgXAs5sCe74axziC3CybFd3L5FV_K6ItPXRYezT9pu-RmtSeOLY6_JiqVPE-_mFzGkBzzhK_Xv9m1ic2cychmwg";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// OIDC issuer: its keys on a local HTTP server.
struct Issuer {
    ed25519: Ed25519KeyPair,
    p256: EcdsaKeyPair,
    /// Base URL of the discovery document.
    base: String,
    is_up: Arc<AtomicBool>,
}

impl Issuer {
    async fn start() -> Result<Self> {
        let random = SystemRandom::new();
        let unusable = |_| anyhow::anyhow!("no key");
        let document = Ed25519KeyPair::generate_pkcs8(&random).map_err(unusable)?;
        let ed25519 = Ed25519KeyPair::from_pkcs8(document.as_ref())?;
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).map_err(unusable)?;
        let p256 = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random)?;
        let point = p256.public_key().as_ref();
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let keys = json!({ "keys": [
            { "kty": "OKP", "crv": "Ed25519", "kid": "ed", "use": "sig", "x": encode(ed25519.public_key().as_ref()) },
            { "kty": "EC", "crv": "P-256", "kid": "ec", "alg": "ES256", "x": encode(&point[1..33]), "y": encode(&point[33..]) },
            { "kty": "RSA", "kid": "rsa", "alg": "RS256", "use": "sig", "n": RSA_MODULUS, "e": "AQAB" },
            { "kty": "OKP", "crv": "Ed25519", "kid": "enc", "use": "enc", "x": encode(ed25519.public_key().as_ref()) },
            { "kty": "oct", "kid": "shared", "k": encode(SECRET.as_bytes()) },
        ] });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        let discovery = json!({ "issuer": base, "jwks_uri": format!("{base}/keys") }).to_string();
        let is_up = Arc::new(AtomicBool::new(true));
        let answers = Arc::clone(&is_up);
        tokio::spawn(async move {
            let keys = keys.to_string();
            while let Ok((mut socket, _)) = listener.accept().await {
                let mut request = [0; 4096];
                let _ = socket.read(&mut request).await;
                let (status, body) = match &request {
                    _ if !answers.load(Ordering::SeqCst) => ("503 Away", ""),
                    request if request.starts_with(b"GET /keys ") => ("200 OK", &*keys),
                    request if request.starts_with(b"GET /.well-known/openid-configuration ") => {
                        ("200 OK", &*discovery)
                    }
                    _ => ("404 Not Found", ""),
                };
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                let _ = socket.write_all(format!("{head}{body}").as_bytes()).await;
            }
        });
        Ok(Self { ed25519, p256, base, is_up })
    }

    fn token(&self, header: Value, claims: &Value) -> String {
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!("{}.{}", encode(&header), encode(claims));
        let signature = match text(&header["alg"]) {
            "ES256" => {
                let signed = self.p256.sign(&SystemRandom::new(), message.as_bytes());
                signed.map(|signature| signature.as_ref().to_vec()).unwrap_or_default()
            }
            "none" => Vec::new(),
            _ => self.ed25519.sign(message.as_bytes()).as_ref().to_vec(),
        };
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

/// Returns valid claims for `seconds` from now.
fn claims(seconds: i64) -> Value {
    claims_of(ISSUER, seconds)
}

fn claims_of(issuer: &str, seconds: i64) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    json!({ "iss": issuer, "aud": AUDIENCE, "exp": i64::try_from(now).unwrap_or_default() + seconds })
}

fn hosted_with(issuer: &str) -> StackBuilder {
    Stack::builder()
        .env("RELAY_HOSTED", "on")
        .env("RELAY_BOOTSTRAP_SECRET", SECRET)
        .env("RELAY_OPERATOR_ISSUER", issuer)
        .env("RELAY_OPERATOR_AUDIENCE", AUDIENCE)
        .env("RELAY_SIGNING_SECRET", "a-signing-secret-of-the-tests-0123456789")
}

async fn hosted(issuer: &Issuer) -> Result<Stack> {
    hosted_with(ISSUER).env("RELAY_OPERATOR_JWKS_URL", format!("{}/keys", issuer.base)).start().await
}

#[tokio::test]
async fn signing_keys_of_an_issuer_are_found_by_discovery() -> Result<()> {
    let issuer = Issuer::start().await?;
    let stack = hosted_with(&issuer.base).gateways(1).start().await?;
    let as_operator = |iss: &str| {
        let token = issuer.token(json!({ "alg": "EdDSA", "kid": "ed" }), &claims_of(iss, 60));
        let operator = Api::new(stack.gateway(0).url(), &token);
        async move { operator.get("/v1/operator/signing-keys").await }
    };
    let admitted = || async { as_operator(&issuer.base).await.is_ok_and(|reply| reply.status == 200) };
    wait::until("the issuer's keys to be found", SOON, admitted).await;
    assert_eq!(as_operator(ISSUER).await?.status, 401);
    Ok(())
}

#[tokio::test]
async fn only_operators_create_workspaces_on_a_hosted_installation() -> Result<()> {
    let issuer = Issuer::start().await?;
    let stack = hosted(&issuer).await?;
    let anybody = Api::anonymous(stack.gateway(0).url());
    let body = || Some(json!({ "name": "w" }));
    let refused = "workspace_create_bootstrap_secret_invalid";
    anybody.post("/v1/workspaces", json!({ "name": "w" })).await?.refused(401, refused)?;
    let with = |secret: &'static str| {
        let anybody = anybody.clone();
        async move {
            anybody.call(Method::POST, "/v1/workspaces", body(), &[("x-workspace-bootstrap-secret", secret)]).await
        }
    };
    with("wrong").await?.refused(401, refused)?;
    let made = with(SECRET).await?.success()?;
    let key = anybody.with_token(text(&made["api_key"]));
    assert_eq!(key.get("/v1/workspace").await?.status, 200);
    // An owner may have another one.
    assert_eq!(key.post("/v1/workspaces", json!({ "name": "second" })).await?.status, 201);
    let operator = anybody.with_token(SECRET);
    assert_eq!(operator.post("/v1/workspaces", json!({ "name": "third" })).await?.status, 201);
    let create = async |headers: &[(&str, &str)]| {
        let body = Some(json!({ "name": "fourth" }));
        operator.call(Method::POST, "/v1/operator/workspaces", body, headers).await
    };
    create(&[("x-relaycast-origin-client", "two words")]).await?.refused(400, "invalid_request")?;
    let fourth = create(&[("x-relaycast-origin-client", "console")]).await?.success()?;
    let shown = anybody.with_token(text(&fourth["api_key"])).get("/v1/workspace").await?.success()?;
    assert_eq!(shown["provenance"]["origin_client"], "console", "{shown}");

    // Quotas of any workspace, effective at once.
    let path = format!("/v1/operator/workspaces/{}/quotas", text(&fourth["workspace_id"]));
    let before = operator.get(&path).await?.success()?;
    assert_eq!((text(&before["plan"]), &before["limits"]["agents"]), ("free", &json!(50)));
    let set = json!({ "plan": "pro", "own": { "observer_tokens": 1 } });
    let after = operator.put(&path, set).await?.success()?;
    assert_eq!((text(&after["plan"]), &after["limits"]["observer_tokens"]), ("pro", &json!(1)));
    assert_eq!(after["own"]["observer_tokens"], 1);
    // The response is a valid request.
    let read = operator.get(&path).await?.success()?;
    let again = operator.put(&path, json!({ "plan": read["plan"], "own": read["own"] })).await?.success()?;
    assert_eq!(again, read);
    let owner = anybody.with_token(text(&fourth["api_key"]));
    let token = |name: &str| json!({ "name": name, "scopes": ["stream:read"] });
    owner.post("/v1/observer-tokens", token("a")).await?.success()?;
    owner.post("/v1/observer-tokens", token("b")).await?.refused(429, "plan_limit_exceeded")?;
    for bad in [
        json!({ "plan": "gold" }),
        json!({ "own": { "robots": 1 } }),
        json!({ "own": { "agents": -1 } }),
        json!({ "own": { "mailbox_depth": 0 } }),
        json!({ "own": { "mailbox_depth": 100_001 } }),
        json!({ "own": { "message_days": 7 } }),
        json!({ "limits": { "agents": 1 } }),
    ] {
        operator.put(&path, bad).await?.refused(400, "invalid_request")?;
    }
    operator.get("/v1/operator/workspaces/1/quotas").await?.refused(404, "workspace_not_found")?;
    owner.get(&path).await?.refused(401, "unauthorized")?;
    depth_and_retention(&operator, &path, &owner).await
}

/// Overrides apply to commits at once and can be removed again.
async fn depth_and_retention(operator: &Api, path: &str, owner: &Api) -> Result<()> {
    let shown = operator.get(path).await?.success()?;
    assert_eq!((&shown["limits"]["mailbox_depth"], &shown["limits"]["message_days"]), (&json!(1000), &Value::Null));
    let (ada, bob) = (owner.register_agent("ada").await?, owner.register_agent("bob").await?);
    let (ada, bob) = (owner.as_agent(&ada), owner.as_agent(&bob));
    let mut sent = 0;
    for (own, fit) in
        [(json!({ "mailbox_depth": 2, "message_days": 30 }), 2), (json!({ "mailbox_depth": 3 }), 3), (json!({}), 5)]
    {
        let set = operator.put(path, json!({ "own": own })).await?.success()?;
        let wanted = (own.get("mailbox_depth").cloned().unwrap_or(json!(1000)), own["message_days"].clone());
        assert_eq!((set["limits"]["mailbox_depth"].clone(), set["limits"]["message_days"].clone()), wanted);
        for _ in 0..2 {
            sent += 1;
            assert_eq!(ada.dm("bob", &format!("message {sent}")).await?.status, 201, "the message itself is kept");
        }
        // A delivery to a full mailbox is not written.
        let waiting = bob.get("/v1/deliveries").await?.success()?;
        assert_eq!(waiting.as_array().map(Vec::len), Some(fit), "after {own}: {waiting}");
    }
    Ok(())
}

#[tokio::test]
async fn only_jwts_of_the_issuer_for_this_audience_authenticate_operators() -> Result<()> {
    let issuer = Issuer::start().await?;
    let stack = hosted(&issuer).await?;
    let anybody = Api::anonymous(stack.gateway(0).url());
    // A token is not accepted while the keys cannot be fetched.
    issuer.is_up.store(false, Ordering::SeqCst);
    let ed = |claims: &Value| issuer.token(json!({ "alg": "EdDSA", "kid": "ed" }), claims);
    let admits = |token: String| {
        let operator = anybody.with_token(&token);
        async move { operator.get("/v1/operator/signing-keys").await }
    };
    admits(ed(&claims(60))).await?.refused(503, "identity_provider_unavailable")?;
    issuer.is_up.store(true, Ordering::SeqCst);
    let token = ed(&claims(600));
    let fetched = || async { admits(token.clone()).await.is_ok_and(|reply| reply.status == 200) };
    wait::until("the issuer's keys to be fetched", SOON, fetched).await;

    let with = |field: &str, value: Value| {
        let mut claims = claims(60);
        claims[field] = value;
        claims
    };
    let without = |field: &str| {
        let mut claims = claims(60);
        claims.as_object_mut().map(|claims| claims.remove(field));
        claims
    };
    let es = json!({ "alg": "ES256", "kid": "ec" });
    for (what, token) in [
        ("Ed25519", ed(&claims(60))),
        ("ES256", issuer.token(es.clone(), &claims(60))),
        ("RS256", RSA_TOKEN.to_owned()),
        ("one audience of several", ed(&with("aud", json!(["other", AUDIENCE])))),
        ("a clock that is a little off", ed(&claims(-10))),
    ] {
        assert_eq!(admits(token).await?.status, 200, "{what}");
    }
    let good = ed(&claims(60));
    let (head, signature) = good.rsplit_once('.').context("a signature")?;
    let (rsa_head, _) = RSA_TOKEN.rsplit_once('.').context("a signature")?;
    for (what, token) in [
        ("expired", ed(&claims(-120))),
        ("not yet", ed(&with("nbf", json!(32_472_144_000_i64)))),
        ("no end", ed(&without("exp"))),
        ("an end that is no number", ed(&with("exp", json!("2999")))),
        ("no audience", ed(&without("aud"))),
        ("another audience", ed(&with("aud", json!("relay")))),
        ("no issuer", ed(&without("iss"))),
        ("another issuer", ed(&with("iss", json!("https://issuer.example.org")))),
        ("an unknown key", issuer.token(json!({ "alg": "EdDSA", "kid": "nobody" }), &claims(60))),
        ("no key named, of several", issuer.token(json!({ "alg": "EdDSA" }), &claims(60))),
        ("a key for encryption", issuer.token(json!({ "alg": "EdDSA", "kid": "enc" }), &claims(60))),
        ("another algorithm's key", issuer.token(json!({ "alg": "EdDSA", "kid": "ec" }), &claims(60))),
        ("a shared secret", issuer.token(json!({ "alg": "HS256", "kid": "shared" }), &claims(60))),
        ("the public key as a shared secret", issuer.token(json!({ "alg": "HS256", "kid": "ed" }), &claims(60))),
        ("no algorithm", issuer.token(json!({ "alg": "none", "kid": "ed" }), &claims(60))),
        ("no signature", format!("{head}.")),
        ("another's signature", format!("{rsa_head}.{signature}")),
        ("no JWT", "x.y.z".to_owned()),
        ("very long", format!("{head}{}.{signature}", "A".repeat(20_000))),
    ] {
        let reply = admits(token).await?;
        // Servers may cut headers before they are parsed.
        assert!(reply.status == 401 || (what == "very long" && reply.status == 431), "{what}: {}", reply.status);
    }
    // Operators create workspaces where others must not.
    let operator = anybody.with_token(&ed(&claims(60)));
    assert_eq!(operator.post("/v1/workspaces", json!({ "name": "w" })).await?.status, 201);
    let forged = anybody.with_token(&ed(&claims(-120)));
    forged.post("/v1/workspaces", json!({ "name": "w" })).await?.refused(401, "unauthorized")?;
    Ok(())
}

#[tokio::test]
async fn rotating_a_key_keeps_its_tokens_and_retiring_it_revokes_them() -> Result<()> {
    let issuer = Issuer::start().await?;
    let stack = hosted(&issuer).await?;
    let (a, b) = (stack.gateway(0).url(), stack.gateway(1).url());
    let operator = Api::new(a, SECRET);
    let made = operator.post("/v1/operator/workspaces", json!({ "name": "w" })).await?.success()?;
    let key = operator.with_token(text(&made["api_key"]));
    let issue = |name: &'static str| {
        let key = key.clone();
        async move {
            let body = json!({ "name": name, "scopes": ["channels:read"] });
            let made = key.post("/v1/observer-tokens", body).await?.success()?;
            anyhow::Ok(key.with_token(text(&made["token"])))
        }
    };
    let older = issue("older").await?;
    let first = operator.get("/v1/operator/signing-keys").await?.success()?;
    let first_kid = text(&first[0]["kid"]).to_owned();
    assert_eq!(
        (first.as_array().map(Vec::len), &first[0]["signs"], &first[0]["sealed"]),
        (Some(1), &json!(true), &json!(true))
    );
    let path = format!("/v1/operator/signing-keys/{first_kid}");
    operator.delete(&path).await?.refused(409, "signing_key_in_use")?;
    operator.delete("/v1/operator/signing-keys/nobody").await?.refused(404, "signing_key_not_found")?;

    let second = operator.post("/v1/operator/signing-keys", json!({})).await?;
    assert_eq!((second.status, &second.data()["signs"]), (201, &json!(true)));
    assert_ne!(text(&second.data()["kid"]), first_kid);
    // The new key is accepted at the other gateway at once.
    let newer = issue("newer").await?;
    assert_ne!(newer.token().split('.').next(), older.token().split('.').next(), "another key signs");
    for gateway in [b, a] {
        for token in [&newer, &older] {
            assert_eq!(token.at(gateway).get("/v1/channels").await?.status, 200);
        }
    }
    // The private key cannot be read from the database.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let stored: Vec<(Vec<u8>, Option<String>)> =
        sqlx::query_as("SELECT private_key, sealed_with FROM signing_keys").fetch_all(&mut database).await?;
    assert_eq!(stored.len(), 2);
    for (private, sealed_with) in &stored {
        assert!(sealed_with.is_some() && Ed25519KeyPair::from_pkcs8(private).is_err());
    }

    assert_eq!(operator.delete(&path).await?.status, 204);
    older.get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    let dead = || async { older.at(b).get("/v1/channels").await.is_ok_and(|reply| reply.status == 401) };
    wait::until("the retired key to be forgotten at the other gateway", SOON, dead).await;
    assert_eq!(newer.at(b).get("/v1/channels").await?.status, 200);
    let (private,): (Option<Vec<u8>>,) = sqlx::query_as("SELECT private_key FROM signing_keys WHERE kid = $1")
        .bind(&first_kid)
        .fetch_one(&mut database)
        .await?;
    assert!(private.is_none(), "a retired key is erased");
    Ok(())
}
