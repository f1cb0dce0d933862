//! Credentials and secrets: token lookup, idempotency keys, encryption keys of the installation. Main
//! types: `TokenLookup` with `TokenOwner`, `IdempotencyKey`, `EncryptedSecretRow`. Used by the engine's access layer.

pub mod encrypted_secrets;
pub(crate) mod idempotency;
pub mod rights;
pub(crate) mod rotation;
pub(crate) mod secret_keys;
pub(crate) mod tokens;
