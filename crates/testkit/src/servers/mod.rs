//! Real Postgres and NATS servers, found or obtained, private to whoever starts them.

mod account;
mod external;
mod find;
mod nats;
mod postgres;
mod postgres_template;
mod wheel;

pub use external::{check_nats, check_postgres};
pub use find::{nats_server, postgres_bin_dir};
pub use nats::Nats;
pub use postgres::Postgres;
