//! Hostile URLs, checked with a recording resolver and connector: no packet leaves the machine.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::HeaderMap;
use relay_egress::{CallLimits, CallOptions, Client, Connect, Failure, Policy, Refusal, Resolve, Tenant};

/// Names with the answers that each lookup gets in turn; the last one stays.
type Names = HashMap<&'static str, Vec<Vec<&'static str>>>;

#[derive(Clone, Default)]
struct Recorder {
    names: Arc<Mutex<Names>>,
    looked_up: Arc<Mutex<Vec<String>>>,
    connected: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Resolve for Recorder {
    async fn resolve(&self, _: Tenant, host: &str) -> io::Result<Vec<IpAddr>> {
        self.looked_up.lock().unwrap().push(host.to_owned());
        let mut names = self.names.lock().unwrap();
        let answers = names.get_mut(host).ok_or(io::ErrorKind::NotFound)?;
        let answer = if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() };
        Ok(answer.into_iter().map(|address| address.parse().unwrap()).collect())
    }
}

impl Connect for Recorder {
    type Stream = tokio::io::DuplexStream;

    async fn connect(&self, address: SocketAddr) -> io::Result<Self::Stream> {
        self.connected.lock().unwrap().push(address);
        Err(io::ErrorKind::ConnectionRefused.into())
    }
}

impl Recorder {
    fn naming(names: impl IntoIterator<Item = (&'static str, Vec<Vec<&'static str>>)>) -> Self {
        Self { names: Arc::new(Mutex::new(names.into_iter().collect())), ..Self::default() }
    }

    fn client(&self, policy: Policy) -> Client<Self, Self> {
        Client::with_transport(policy, CallLimits::default(), self.clone(), self.clone())
    }

    fn connected(&self) -> Vec<SocketAddr> {
        self.connected.lock().unwrap().clone()
    }
}

async fn call(client: &Client<Recorder, Recorder>, url: &str) -> Failure {
    match client.policy().check_url(url) {
        Ok(target) => {
            let posted = client.post(&target, HeaderMap::new(), Bytes::from_static(b"{}"), CallOptions::default());
            posted.await.expect_err("the recorder never connects")
        }
        Err(refusal) => refusal.into(),
    }
}

/// Refused by their text alone: at registration, and again at dispatch.
const HOSTILE: &[&str] = &[
    // This machine.
    "https://127.0.0.1/",
    "https://127.0.0.1:8443/",
    "https://127.1.2.3/",
    "https://0.0.0.0/",
    "https://0.1.2.3/",
    "https://localhost/",
    "https://LOCALHOST/",
    "https://a.localhost/",
    "https://localhost.localdomain/",
    "https://[::1]/",
    "https://[::]/",
    "https://[0:0:0:0:0:0:0:1]/",
    // Private, link-local, carrier-grade, multicast and reserved addresses.
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.168.1.1/",
    "https://169.254.1.1/",
    "https://100.64.0.1/",
    "https://198.18.0.1/",
    "https://192.0.2.1/",
    "https://198.51.100.1/",
    "https://203.0.113.1/",
    "https://224.0.0.1/",
    "https://239.1.2.3/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    "https://[fc00::1]/",
    "https://[fd00::1]/",
    "https://[fe80::1]/",
    "https://[fec0::1]/",
    "https://[ff02::1]/",
    "https://[2001:db8::1]/",
    "https://[100::1]/",
    "https://[4000::1]/",
    // Clouds.
    "https://169.254.169.254/latest/meta-data/",
    "https://168.63.129.16/",
    "https://100.100.100.200/",
    "https://192.0.0.192/",
    "https://[fd00:ec2::254]/",
    "https://[fd20:ce::254]/",
    "https://metadata.google.internal/",
    "https://metadata/",
    // Version 4 in the clothes of version 6.
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::ffff:169.254.169.254]/",
    "https://[::ffff:8.8.8.8]/",
    "https://[::ffff:0:127.0.0.1]/",
    "https://[::127.0.0.1]/",
    "https://[2002:7f00:1::]/",
    "https://[2002:a9fe:a9fe::1]/",
    "https://[64:ff9b::127.0.0.1]/",
    "https://[64:ff9b::a9fe:a9fe]/",
    "https://[64:ff9b:1::1]/",
    "https://[2001:0:7f00:1::]/",
    // Addresses in odd spellings.
    "https://2130706433/",
    "https://017700000001/",
    "https://0x7f000001/",
    "https://0x7f.0x0.0x0.0x1/",
    "https://0177.0.0.1/",
    "https://127.1/",
    "https://127.0.1/",
    "https://0/",
    "https://127.0.0.1./",
    "https://127.000.000.001/",
    "https://8.8.8.8./",
    "https://134744072/",
    "https://0x08.8.8.8/",
    "https://256.1.1.1/",
    "https://1.1.1.1.1/",
    "https://[fe80::1%25eth0]/",
    "https://[::1",
    "https://::1/",
    "https://[127.0.0.1]/",
    // Names in odd spellings.
    "https://example.org./",
    "https://example.org../",
    "https://.example.org/",
    "https://a..b/",
    "https://①②⑦.⓪.⓪.①/",
    "https://１２７.0.0.1/",
    "https://127。0。0。1/",
    "https://ⓛocalhost/",
    "https://exämple.org/",
    "https://xn--/",
    "https://%6c%6f%63%61%6c%68%6f%73%74/",
    "https://127.0.0.1%2f@example.org/",
    "https://example.org%00.evil/",
    "https://exa\u{ad}mple.org/",
    "https://-a.example/",
    // Names inside networks.
    "https://intranet/",
    "https://printer.local/",
    "https://router.lan/",
    "https://nas.home.arpa/",
    "https://vault.corp/",
    "https://kubernetes.default.svc/",
    "https://kubernetes.default.svc.cluster.local/",
    // Users, ports, schemes, spaces, slashes.
    "https://user@example.org/",
    "https://user:password@example.org/",
    "https://@example.org/",
    "https://example.org@127.0.0.1/",
    "https://example.org:443@127.0.0.1/",
    "https://example.org:/",
    "https://example.org:0/",
    "https://example.org:0443/",
    "https://example.org:65536/",
    "https://example.org:+443/",
    "https://example.org:443:443/",
    "http://example.org/",
    "HTTP://example.org/",
    "ftp://example.org/",
    "file:///etc/passwd",
    "gopher://example.org/",
    "javascript:alert(1)",
    "data:text/plain,x",
    "//example.org/",
    "example.org",
    "",
    "https://",
    "https:///example.org",
    "https:/example.org",
    "https:example.org",
    "https:\\\\example.org\\",
    "https://example.org\\@127.0.0.1/",
    " https://example.org/",
    "https://exa mple.org/",
    "https://example.org\t/",
    "https://example.org/\r\nX-Injected: 1",
    "https://example.org\0/",
    "https://?x",
    "https://#x",
];

#[tokio::test]
async fn hostile_urls_are_refused_when_registered_and_when_called() {
    assert!(HOSTILE.len() >= 60);
    let recorder = Recorder::default();
    let client = recorder.client(Policy::default());
    for url in HOSTILE {
        assert!(client.policy().check_url(url).is_err(), "{url:?} was registered");
        assert!(matches!(call(&client, url).await, Failure::Refused(_)), "{url:?} was called");
    }
    let long = format!("https://example.org/{}", "x".repeat(2048));
    assert_eq!(client.policy().check_url(&long), Err(Refusal::NotAUrl));
    assert!(recorder.looked_up.lock().unwrap().is_empty(), "nothing was even looked up");
    assert!(recorder.connected().is_empty());
}

/// Harmless to look at; each has at least one address that is not.
const HOSTILE_ANSWERS: &[&[&str]] = &[
    &["127.0.0.1"],
    &["93.184.216.34", "127.0.0.1"],
    &["127.0.0.1", "93.184.216.34"],
    &["93.184.216.34", "93.184.216.35", "93.184.216.36", "93.184.216.37", "10.0.0.1"],
    &["0.0.0.0"],
    &["10.1.2.3"],
    &["100.64.1.1"],
    &["169.254.169.254"],
    &["168.63.129.16"],
    &["172.20.1.1"],
    &["192.168.0.10"],
    &["224.0.0.251"],
    &["255.255.255.255"],
    &["::1"],
    &["::ffff:127.0.0.1"],
    &["::ffff:93.184.216.34"],
    &["2606:4700::1", "fe80::1"],
    &["fd00:ec2::254"],
    &["fc00::1"],
    &["2002:a00:1::1"],
    &["64:ff9b::a00:1"],
    &["2001::1"],
    &["ff02::fb"],
];

#[tokio::test]
async fn a_name_with_one_bad_address_is_never_connected_to() {
    for answer in HOSTILE_ANSWERS {
        let recorder = Recorder::naming([("hooks.example.org", vec![answer.to_vec()])]);
        let client = recorder.client(Policy::default());
        assert!(client.policy().check_url("https://hooks.example.org/").is_ok(), "its text is harmless");
        let failure = call(&client, "https://hooks.example.org/").await;
        assert!(matches!(failure, Failure::Refused(Refusal::Address(_))), "{answer:?}: {failure:?}");
        assert!(recorder.connected().is_empty(), "{answer:?}");
    }
}

#[tokio::test]
async fn a_rebound_name_is_refused_at_the_next_attempt() {
    let answers = vec![vec!["93.184.216.34"], vec!["127.0.0.1"], vec!["93.184.216.34"], vec!["169.254.169.254"]];
    let recorder = Recorder::naming([("rebound.example.org", answers)]);
    let client = recorder.client(Policy::default());
    let target = client.policy().check_url("https://rebound.example.org:8443/").unwrap();
    let attempt = || client.post(&target, HeaderMap::new(), Bytes::new(), CallOptions::default());
    assert!(matches!(attempt().await, Err(Failure::Connect(_))));
    assert!(matches!(attempt().await, Err(Failure::Refused(_))));
    assert!(matches!(attempt().await, Err(Failure::Connect(_))));
    assert!(matches!(attempt().await, Err(Failure::Refused(_))));
    let public: SocketAddr = "93.184.216.34:8443".parse().unwrap();
    assert_eq!(recorder.connected(), [public, public], "connections go to the checked address");
    assert_eq!(recorder.looked_up.lock().unwrap().len(), 4, "each attempt looks again, once");
}

#[tokio::test]
async fn addresses_are_tried_in_turn_up_to_the_limit() {
    let many = ["93.184.216.1", "93.184.216.2", "93.184.216.3", "93.184.216.4", "93.184.216.5"];
    let recorder = Recorder::naming([("many.example.org", vec![many.to_vec()]), ("none.example.org", vec![vec![]])]);
    let client = recorder.client(Policy::default());
    assert!(matches!(call(&client, "https://many.example.org/").await, Failure::Connect(_)));
    assert_eq!(recorder.connected().len(), CallLimits::default().addresses);
    assert!(matches!(call(&client, "https://none.example.org/").await, Failure::Connect(_)));
    assert!(matches!(call(&client, "https://unknown.example.org/").await, Failure::Connect(_)));
}

#[tokio::test]
async fn an_allow_rule_permits_only_its_destination() {
    let recorder = Recorder::naming([
        ("dev.example.org", vec![vec!["127.0.0.1"]]),
        ("lan.example.org", vec![vec!["10.0.0.1"]]),
        ("vouched.example.org", vec![vec!["10.0.0.1"]]),
    ]);
    let allow = ["127.0.0.0/8", "vouched.example.org"].map(|rule| rule.parse().unwrap()).to_vec();
    let client = recorder.client(Policy { strict: true, allow });
    for url in ["http://127.0.0.1:9/", "https://dev.example.org/", "http://vouched.example.org/"] {
        assert!(matches!(call(&client, url).await, Failure::Connect(_)), "{url}");
    }
    for url in ["http://dev.example.org/", "https://lan.example.org/", "https://10.0.0.1/", "https://[::1]/"] {
        assert!(matches!(call(&client, url).await, Failure::Refused(_)), "{url}");
    }
    assert_eq!(recorder.connected().len(), 3);
}
