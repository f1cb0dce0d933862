//! All NATS access of the engine: the per-agent log on JetStream, hints between processes, liveness probes.
//!
//! Nothing here has authority: the log may lag, lose or reorder, a hint may be lost, and receivers compare with
//! Postgres. An outage of NATS costs latency, never a message.

pub mod admin;
mod connection;
mod error;
mod events;
mod hints;
mod log;
mod probe;
mod recovery;
mod subjects;

pub use connection::{LinkState, Stream, check_url};
pub use error::{StreamError, StreamResult};
pub use events::{EVENT_RECORD_LIMIT, EventRecord, EventTail};
pub use hints::{Hint, Hints};
pub use log::{INLINE_LIMIT, LiveFrame, LogFrame, PendingStore, Tail};
pub use probe::{ProbeRequest, Probes};
pub use recovery::{LogKind, LogState, LoggedFrame};
