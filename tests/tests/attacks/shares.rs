//! Shares of one tenant in what a gateway holds and runs, also with child workspaces: others keep theirs.

mod families;
mod searches;
