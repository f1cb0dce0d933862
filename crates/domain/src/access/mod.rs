//! Access: bearer tokens and the workspace scope of a call. Main types: [`token::TokenKind`], [`token::TokenHash`] and
//! [`scope::WorkspaceScope`]. Used by authentication in the engine and by every store call.

pub mod client_network;
pub mod scope;
pub mod token;
