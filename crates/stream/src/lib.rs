//! All NATS of the engine: the per-agent log on JetStream, hints between processes, liveness probes.
//!
//! Nothing here has authority. The log may lag, lose or reorder, a hint may be lost; whoever reads
//! them compares with Postgres. Losing NATS costs latency, never a message.

pub mod admin;
mod connection;
mod error;
mod events;
mod hints;
mod log;
mod probe;
mod recovery;
mod subjects;

pub use connection::{Link, Stream, check_url};
pub use error::{StreamError, StreamResult};
pub use events::{EVENT_RECORD_LIMIT, EventRecord, EventTail};
pub use hints::{Hint, Hints};
pub use log::{INLINE_LIMIT, LiveFrame, LogFrame, Stored, Tail};
pub use probe::{ProbeRequest, Probes};
pub use recovery::{LogKind, LogState, LoggedFrame};
