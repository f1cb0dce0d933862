//! Shares of one tenant in what a gateway holds and runs, also with child workspaces: others keep theirs.

mod database_connections;
mod families;
mod searches;
