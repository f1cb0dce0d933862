//! Calls to addresses that tenants gave: the only place of the engine that opens a connection to one.
//!
//! A URL is judged three times. [`Policy::check_url`] reads its text, when it is registered and again at each
//! attempt. Each attempt resolves the host anew and judges *every* address that it has. The connection then goes
//! to an address that was judged, never to a name, so that a name that changes its mind in between gains nothing.
//! Redirects are not followed, proxies of the environment are not used, and answers are read up to a bound.
//!
//! Called by the worker's dispatching loops and, for the check at registration, by the gateway through the engine.

mod address;
mod client;
mod config;
mod connect;
mod policy;
mod pool;
mod target;
mod tls;

pub use address::{Reason, judge};
pub use client::{Answer, Client, Failure, Limits, Options};
pub use config::{AllowList, EgressConfig, Switch};
pub use connect::{Connect, Resolve, SystemResolver, TcpConnector};
pub use policy::{AllowRule, Policy};
pub use target::{Refusal, Target};
