//! Calls to tenants' URLs: the only place of the engine that connects to addresses chosen by tenants.
//!
//! A URL is checked three times. [`Policy::check_url`] checks its text at registration and again at every attempt.
//! Every attempt resolves the host and checks *every* address. The connection then goes to a checked address, never to
//! a name, so DNS rebinding has no effect. Redirects are not followed, proxies of the environment are not used, and
//! answers are read up to a limit.
//!
//! Used by the worker's dispatch loops and, for the check at registration, by the gateway through the engine.

mod address;
mod client;
mod config;
mod connect;
mod policy;
mod pool;
mod resolver;
mod target;
mod tls;

pub use address::{BlockedReason, blocked_reason};
pub use client::{Answer, CallLimits, CallOptions, Client, Failure};
pub use config::{AllowList, EgressConfig, NameServers, Switch};
pub use connect::{Connect, TcpConnector};
pub use policy::{AllowRule, Policy};
pub use resolver::{Resolve, SystemResolver, Tenant};
pub use target::{Refusal, Target};
