//! Signs of life. `/health` is not in the envelope; its fields are.

use serde::Serialize;
use utoipa::ToSchema;

/// Answer to `GET /health`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Always true.
    #[schema(example = true)]
    pub ok: bool,
    /// The engine's version.
    #[schema(example = "0.1.0")]
    pub version: &'static str,
    /// What runs.
    pub build: Build,
}

/// What runs.
#[derive(Debug, Serialize, ToSchema)]
pub struct Build {
    /// The program.
    #[schema(example = "relay-gateway")]
    pub name: &'static str,
    /// Its version.
    #[schema(example = "0.1.0")]
    pub version: &'static str,
}

/// Answer to `GET /ready`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Ready {
    /// Always true; what is not ready answers 503.
    #[schema(example = true)]
    pub ready: bool,
}
