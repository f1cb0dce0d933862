//! What operators read and change with direct access to the database: `relay_engine::admin`. No request of a client comes here.

mod erase;
mod health;
mod mailboxes;
mod workspaces;

pub use erase::{EndedWorkspace, EraseStep, Erased, ExportedRow, OWN_TABLE};
pub use health::{DatabaseHealth, SchemaState};
pub use mailboxes::{DeadLetterRow, MailboxException, MailboxFrame, MailboxInside};
pub use workspaces::{TokenKilled, WorkspaceSummary};
