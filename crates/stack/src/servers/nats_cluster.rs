//! Cluster of nats-servers whose links to each other and to clients pass proxies, so that a test can partition one.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::Nats;
use super::nats::configuration;
use crate::ports::Port;
use crate::proxy::TcpProxy;

/// Servers of one JetStream cluster.
#[derive(Debug)]
pub struct NatsCluster {
    // Clients are cut off before their servers end.
    clients: Vec<TcpProxy>,
    links: Vec<Link>,
    servers: Vec<Nats>,
    _route_ports: Vec<Port>,
}

/// Way from one server to another.
#[derive(Debug)]
struct Link {
    ends: [usize; 2],
    proxy: TcpProxy,
}

impl NatsCluster {
    /// Starts `count` servers in folders of `dir`.
    pub async fn start(dir: &Path, count: usize) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let route_ports = (0..count).map(|_| Port::free()).collect::<Result<Vec<_>>>()?;
        let (mut clients, mut links, mut servers) = (Vec::new(), Vec::new(), Vec::new());
        for (number, route_port) in route_ports.iter().enumerate() {
            let mut routes = Vec::new();
            // Each server needs routes. Of two connections between the same servers one is closed.
            for (other, other_port) in route_ports.iter().enumerate().filter(|(other, _)| *other != number) {
                let proxy = TcpProxy::start(&other_port.address())?;
                routes.push(format!("\"nats://{}\"", proxy.address()));
                links.push(Link { ends: [other, number], proxy });
            }
            let home = dir.join(format!("server-{number}"));
            fs::create_dir_all(&home)?;
            let port = Port::free()?;
            let proxy = TcpProxy::start(&port.address())?;
            let mut text = configuration(&format!("relay-{number}"), port.number(), &home.join("jetstream"));
            // The advertised addresses lead clients to the proxies, and no server past the proxies to another one.
            text.push_str(&format!(
                r#"client_advertise: "{}"
cluster {{
  name: "relay"
  listen: "{}"
  advertise: "127.0.0.1:1"
  routes: [{}]
}}
"#,
                proxy.address(),
                route_port.address(),
                routes.join(", ")
            ));
            servers.push(Nats::start_on(&home, port, &text)?);
            clients.push(proxy);
        }
        for server in &servers {
            server.wait_until_ready().await?;
        }
        Ok(Self { clients, links, servers, _route_ports: route_ports })
    }

    /// Returns the URLs of all servers, through their proxies.
    pub fn url(&self) -> String {
        let urls: Vec<_> = self.clients.iter().map(|proxy| format!("nats://{}", proxy.address())).collect();
        urls.join(",")
    }

    /// Returns all servers. Number `n` has the name `relay-n`.
    pub fn servers(&self) -> &[Nats] {
        &self.servers
    }

    /// Returns the number of clients that are connected to a server.
    pub fn client_count(&self, server: usize) -> usize {
        self.clients[server].connection_count()
    }

    /// Separates a server from the others and from its clients, whose connections stay open and silent.
    pub fn partition(&self, server: usize) {
        self.clients[server].blackhole();
        self.links_of(server).for_each(|link| link.proxy.blackhole());
    }

    /// Ends the partition of a server.
    pub fn heal(&self, server: usize) {
        self.clients[server].restore();
        self.links_of(server).for_each(|link| link.proxy.restore());
    }

    fn links_of(&self, server: usize) -> impl Iterator<Item = &Link> {
        self.links.iter().filter(move |link| link.ends.contains(&server))
    }
}
