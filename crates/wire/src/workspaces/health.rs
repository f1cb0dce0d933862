//! Responses of the health routes. `/health` returns its fields without the envelope.

use serde::Serialize;
use utoipa::ToSchema;

/// Response of `GET /health`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Always true.
    #[schema(example = true)]
    pub ok: bool,
    /// Version of the engine.
    #[schema(example = "0.1.0")]
    pub version: &'static str,
    /// Running build.
    pub build: Build,
}

/// Running build.
#[derive(Debug, Serialize, ToSchema)]
pub struct Build {
    /// The program.
    #[schema(example = "relay-gateway")]
    pub name: &'static str,
    /// Its version.
    #[schema(example = "0.1.0")]
    pub version: &'static str,
}

/// Response of `GET /ready`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Ready {
    /// Always true; a process that is not ready answers 503.
    #[schema(example = true)]
    pub ready: bool,
}
