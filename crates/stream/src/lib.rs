//! All NATS access of the engine: the per-agent log on JetStream, live copies, hints between
//! processes, liveness probes.
//!
//! Nothing here has authority: the log may lag, lose or reorder, a hint may be lost, and receivers compare with
//! Postgres. An outage of NATS costs latency, never a message. A message that no process of this installation has
//! signed is a wake-up ([`FrameKeys`]).

pub mod admin;
mod connection;
mod error;
mod events;
mod hints;
mod live;
mod log;
mod mac;
mod probe;
mod recovery;
mod subjects;

pub use connection::{Clock, LinkState, NatsServers, ProcessIdentity, Stream, check_url, unverified_hosts};
pub use error::{StreamError, StreamResult};
pub use events::{EVENT_RECORD_LIMIT, EventCopy, EventRecord, EventTail};
pub use hints::{Hint, Hints};
pub use live::{LiveCopies, LiveCopy, LiveFrame};
pub use log::{INLINE_LIMIT, LogFrame, PendingStore};
pub use mac::FrameKeys;
pub use probe::{ProbeRequest, Probes};
pub use recovery::{LogKind, LogState, LoggedFrame, VerifiedPage};
