//! DNS server on loopback. Main type: [`NameServer`]: it answers `127.0.0.1` for every name but those below `silent.`,
//! about which it says nothing.

use std::{
    collections::HashSet,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{net::UdpSocket, task::AbortHandle};

/// Length of the fixed part of a message.
const HEAD: usize = 12;
/// First label of the names that are not answered, with its length.
const SILENT: &[u8] = b"\x06silent";
const TYPE_A: [u8; 2] = [0, 1];

/// Name server, stopped when dropped.
#[derive(Debug)]
pub struct NameServer {
    address: SocketAddr,
    silent: Arc<Mutex<HashSet<Vec<u8>>>>,
    task: AbortHandle,
}

impl NameServer {
    /// Starts a server on a free port.
    pub async fn start() -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (address, silent) = (socket.local_addr()?, Arc::<Mutex<HashSet<Vec<u8>>>>::default());
        let asked = Arc::clone(&silent);
        let task = tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                match (answer(&query[..length]), name(&query[..length])) {
                    (Some(answer), _) => drop(socket.send_to(&answer, from).await),
                    (None, Some(name)) => {
                        asked.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_vec());
                    }
                    (None, None) => {}
                }
            }
        });
        Ok(Self { address, silent, task: task.abort_handle() })
    }

    /// Returns the address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of different names that were asked for and not answered.
    pub fn unanswered_names(&self) -> usize {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Forgets the names that were asked for so far. Those that are asked for again count again.
    pub fn forget_unanswered_names(&self) {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the name of a query's question, in the form of the protocol.
fn name(query: &[u8]) -> Option<&[u8]> {
    query.get(HEAD..)?.split(|byte| *byte == 0).next()
}

/// Builds the answer to a query, or `None` for a name that is not answered.
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let labels = query.get(HEAD..)?;
    if labels.windows(SILENT.len()).any(|label| label == SILENT) {
        return None;
    }
    let name = name(query)?.len();
    // The name ends with an empty label; type and class follow.
    let question = labels.get(..name + 5)?;
    let is_address = question[name + 1..name + 3] == TYPE_A;
    let mut answer = query[..2].to_vec();
    // A response without error: one question, and an answer to a query for version 4.
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_address), 0, 0, 0, 0]);
    answer.extend(question);
    if is_address {
        // The name of the question, type and class, a minute to live, and four bytes of address.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}
