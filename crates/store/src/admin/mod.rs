//! What operators read and change with direct access to the database: `relay_engine::admin`. No request of a client comes here.

mod erase;
mod health;
mod mailboxes;
mod workspaces;

pub use erase::Erased;
pub use health::{DatabaseHealth, SchemaState};
pub use mailboxes::{DeadLetterRow, MailboxException, MailboxFrame, MailboxInside};
pub use workspaces::{TokenKilled, WorkspaceSummary};
