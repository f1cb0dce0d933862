//! Real, unmodified clients: installed from the public registries, run against a real engine.

mod broker;
mod front;
mod history;
mod install;
mod script;

pub use broker::{AgentScript, Broker, BrokerRelease, Position};
pub use front::Front;
pub use history::ClientHistory;
pub use install::{
    command_line, npm_packages, python_broker_packages, python_packages, python_runner_packages, runner_package,
    runners, schemathesis, scripts,
};
pub use script::{Request, Script};
