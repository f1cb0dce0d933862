//! Callers and what they may do: authentication, idempotency keys, rate limits, operators, secrets. Handle:
//! [`authentication::Access`]. Main types: [`callers::Credential`], [`limits::RateLimitSubject`], `tokens::Tokens`,
//! `secrets::Secrets`.

pub mod authentication;
pub mod callers;
pub(crate) mod credential_cache;
pub mod idempotency;
pub(crate) mod jwt;
pub mod limits;
pub(crate) mod lookups;
pub mod operators;
pub(crate) mod reencryption;
pub(crate) mod refusals;
pub(crate) mod rights;
pub mod secrets;
pub(crate) mod tokens;
