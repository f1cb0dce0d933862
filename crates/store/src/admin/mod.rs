//! Reads and changes of operators with direct access to the database. Called by `relay_admin`, and by a worker for
//! erasures; never by a request of a client. Main types: [`WorkspaceSummary`], [`MailboxDetails`], [`DatabaseHealth`].

mod erase;
mod health;
mod mailboxes;
mod workspaces;

pub use erase::{EndedWorkspace, EraseStep, ExportedRow, TableRowCount, WORKSPACES_TABLE};
pub use health::{DatabaseHealth, SchemaState};
pub use mailboxes::{DeadLetterSummary, MailboxDetails, MailboxEntry, MailboxSettlement};
pub use workspaces::{RevokedToken, WorkspaceSummary};
