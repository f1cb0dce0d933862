//! The resolver against a name server on this machine that fails, is silent, and counts.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use relay_egress::{CallLimits, CallOptions, Client, Policy, Resolve as _, SystemResolver, Tenant};
use tokio::{net::UdpSocket, sync::watch, time::Instant};

/// Lookups of one tenant at the same time.
const SHARE: usize = 8;
/// Time for which a failed name is not looked up again.
const FAILURE_TTL: Duration = Duration::from_millis(900);
/// Far below the time of a lookup (5 s) and the wait for a turn (3 s), and a while on a loaded machine.
const AT_ONCE: Duration = Duration::from_millis(2500);
const SOON: Duration = Duration::from_secs(30);

/// Length of the fixed part of a message.
const HEAD: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];
const SERVER_FAILURE: u8 = 2;
const NO_SUCH_NAME: u8 = 3;

/// Name server on a free port. The first label of a name decides: `missing` does not exist, `failing` is an error,
/// names with `silent` get no answer, and all others have the address 127.0.0.1.
struct NameServer {
    address: SocketAddr,
    /// First labels of the queries so far.
    asked: watch::Sender<Vec<String>>,
}

impl NameServer {
    async fn start() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (address, asked) = (socket.local_addr().unwrap(), watch::Sender::default());
        let log: watch::Sender<Vec<String>> = asked.clone();
        tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                let query = &query[..length];
                let label_end = HEAD + 1 + usize::from(query[HEAD]);
                let label = String::from_utf8_lossy(&query[HEAD + 1..label_end]).into_owned();
                log.send_modify(|asked| asked.push(label.clone()));
                if !label.starts_with("silent") {
                    socket.send_to(&answer(query, &label), from).await.unwrap();
                }
            }
        });
        Self { address, asked }
    }

    fn resolver(&self) -> SystemResolver {
        SystemResolver::new(&[self.address])
    }

    /// Returns the number of queries for names with this first label.
    fn queries(&self, label: &str) -> usize {
        self.asked.borrow().iter().filter(|asked| *asked == label).count()
    }

    /// Waits until one of these names was asked for each.
    async fn wait_for_queries(&self, labels: &[String]) {
        let mut asked = self.asked.subscribe();
        let all = asked.wait_for(|asked| labels.iter().all(|label| asked.contains(label)));
        let is_complete = tokio::time::timeout(SOON, all).await.is_ok();
        assert!(is_complete, "only {:?} were asked for", self.asked.borrow());
    }
}

/// Builds the answer to a query.
fn answer(query: &[u8], label: &str) -> Vec<u8> {
    let name = query[HEAD..].iter().position(|byte| *byte == 0).unwrap();
    // The name ends with an empty label; type and class follow.
    let question = &query[HEAD..HEAD + name + 5];
    let code = match label {
        "missing" => NO_SUCH_NAME,
        "failing" => SERVER_FAILURE,
        _ => 0,
    };
    let has_address = code == 0 && question[name + 1..name + 3] == TYPE_A;
    let mut answer = query[..2].to_vec();
    answer.extend([0x81, 0x80 | code, 0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
    answer.extend(question);
    if has_address {
        // The name of the question, type and class, a minute to live, and four bytes of address.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
    }
    answer
}

async fn resolve(resolver: &SystemResolver, tenant: i64, label: &str) -> io::Result<Vec<IpAddr>> {
    resolver.resolve(Tenant(tenant), &format!("{label}.example.test")).await
}

/// Looks up a name that fails, again and again, until the server is asked about it once more.
async fn is_looked_up_again_after_a_while(label: &str, kind: io::ErrorKind) {
    let server = NameServer::start().await;
    let resolver = server.resolver();
    let began = Instant::now();
    assert_eq!(resolve(&resolver, 1, label).await.unwrap_err().kind(), kind);
    let first = server.queries(label);
    assert!(first > 0, "the server is asked");
    while server.queries(label) == first {
        assert!(began.elapsed() < SOON, "the failure is remembered for ever");
        for tenant in [1, 2] {
            assert_eq!(resolve(&resolver, tenant, label).await.unwrap_err().kind(), kind);
        }
        assert_eq!(resolve(&resolver, 1, "other").await.unwrap(), [Ipv4Addr::LOCALHOST], "another name");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(began.elapsed() >= FAILURE_TTL, "asked again after {:?}", began.elapsed());
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_not_looked_up_again_for_a_while() {
    is_looked_up_again_after_a_while("missing", io::ErrorKind::NotFound).await;
}

/// Name servers' errors are no records, so they have no time to live of their own.
#[tokio::test]
async fn a_name_whose_server_fails_is_not_looked_up_again_for_a_while() {
    is_looked_up_again_after_a_while("failing", io::ErrorKind::Other).await;
}

#[tokio::test]
async fn a_lookup_ends_with_its_call() {
    let server = NameServer::start().await;
    let resolver = server.resolver();
    let allow = vec!["127.0.0.1".parse().unwrap()];
    let client = Client::new(Policy { strict: true, allow }, CallLimits::default(), resolver.clone());
    let labels: Vec<String> = (0..SHARE).map(|nth| format!("silent-{nth}")).collect();
    let calls: Vec<_> = labels
        .iter()
        .map(|label| {
            let target = client.policy().check_url(&format!("https://{label}.example.test/")).unwrap();
            let client = client.clone();
            let options = CallOptions { timeout: Some(SOON), tenant: Tenant(1) };
            tokio::spawn(async move { client.post(&target, HeaderMap::new(), Bytes::new(), options).await })
        })
        .collect();
    server.wait_for_queries(&labels).await;
    let other = tokio::time::timeout(AT_ONCE, resolve(&resolver, 2, "other")).await;
    assert_eq!(other.expect("another tenant does not wait").unwrap(), [Ipv4Addr::LOCALHOST]);
    // The tenant's lookups are all taken, each for seconds.
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    let own = tokio::time::timeout(AT_ONCE, resolve(&resolver, 1, "own")).await;
    assert_eq!(own.expect("the lookups have ended with their calls").unwrap(), [Ipv4Addr::LOCALHOST]);
}
