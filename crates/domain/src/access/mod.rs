//! Access: bearer tokens, the workspace scope of a call, and the rights of agents. Main types: [`token::TokenKind`],
//! [`token::TokenHash`], [`rights::Rights`] and
//! [`scope::WorkspaceScope`]. Used by authentication in the engine and by every store call.

pub mod client_network;
pub mod rights;
pub mod scope;
pub mod token;
