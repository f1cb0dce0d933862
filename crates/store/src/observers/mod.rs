//! Observer tokens, their overrides and signing keys, and filters as query parameters. Called by the engine's
//! `observers` and `access` folders; filters by all lists that observers read. Main types: `NewObserverToken`,
//! `OverrideRow`, `SigningKeyRow`.

pub(crate) mod filters;
pub(crate) mod overrides;
pub(crate) mod tokens;
