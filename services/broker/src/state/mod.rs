//! Files of the broker: the state directory and its lock ([`StateDirectory`]), the connection file
//! ([`ConnectionFile`]), the agents that run ([`Roster`]), and the ledger of proofs ([`Ledger`]); entries in
//! files of users' projects ([`ProjectFiles`]). Used by startup and by the tasks of agents.

mod connection_file;
mod directory;
mod file;
mod ledger;
mod project_files;
mod roster;
mod versioned;

pub(crate) use connection_file::ConnectionFile;
pub(crate) use directory::{Persistence, StateDirectory};
pub(crate) use file::{create_private_directory, write_private_file};
pub(crate) use ledger::{Ledger, LedgerEntry, LedgerTask};
pub(crate) use project_files::{ProjectFiles, ProjectPath};
pub(crate) use roster::{AgentRecord, Roster, RosterFile};
pub(crate) use versioned::{read_versioned, refuse_newer, write_versioned};
