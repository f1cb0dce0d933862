//! The OpenAPI document: made from the handlers, completed here, served at `/openapi.json`.
//!
//! To describe a handler:
//! 1. `#[utoipa::path(post, path = "/v1/…", tag = "channels", security(("workspace_key" = []), ("agent_token" = [])),
//!    request_body = wire::SomeBody, responses((status = 201, body = wire::Some), (status = 409,
//!    description = "some_code, other_code")))]` above it. The path is the router's, the tag one of `TAGS`. The first
//!    line of its doc comment becomes the summary, the rest the description.
//! 2. A 2xx names what `Reply<…>` holds (`()` when acknowledged, no body for 204); a refusal lists its codes as its
//!    description. What every route has in common is added by `complete`: path parameters, the envelopes, 400
//!    `invalid_request`, 401, 413, 415, 429, 500, 503, and examples. Do not write those.
//! 3. `params(wire::SomeQuery)` for a query, `params(IdempotencyKey)` beside a `KeyedBody`.
//! 4. The wire types derive `ToSchema` (queries `IntoParams` with `#[into_params(parameter_in = Query)]`). Ids of the
//!    domain need `#[schema(value_type = Id)]`, objects `value_type = Object`, words `value_type = words::…`. A field
//!    that is left out instead of null needs `#[schema(nullable = false)]`. `#[schema(example = "…")]` where
//!    `example::BY_NAME` knows no example. Names of wire types are unique, whatever their module.
//! 5. The handler goes into the list of `Handlers` below. `tests/tests/openapi/document.rs` fails while it does not.
//!
//! Then `cargo xtask openapi` writes `docs/openapi.json` again.

mod complete;
mod example;

use std::sync::OnceLock;

use relay_wire::envelope::Failure;
use serde_json::Value;
use utoipa::{
    IntoParams, Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{console, node, observe, routes};

/// The subjects, in the order in which the reference shows them.
const TAGS: &[(&str, &str)] = &[
    ("workspaces", "A workspace is a tenant: everything below belongs to exactly one."),
    ("agents", "Whoever has a mailbox: programs, people, parts of systems."),
    ("channels", "Where members of a workspace talk to each other."),
    ("messages", "What is said in channels and threads, and reading it."),
    ("direct messages", "Conversations between two agents, or in a group."),
    ("deliveries", "An agent's mailbox: one delivery for each message that it gets."),
    ("nodes", "Where agents are reached: an agent's own connection, or a broker that hosts many."),
    ("actions", "What nodes and agents can be asked to do, and what came of it."),
    ("sockets", "WebSockets. Their frames are not part of this document."),
    ("observers", "Tokens that only read, and what happens in a workspace as it happens."),
    ("operators", "For whoever runs the installation."),
    ("files", "What messages carry besides text."),
    ("webhooks", "Messages from outside, and events to the outside."),
    ("service", "The gateway itself."),
];

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Relay",
        description = "Carries messages between agents. Every answer but 204 is JSON with a boolean `ok`: \
            `{\"ok\":true,\"data\":…}`, or `{\"ok\":false,\"error\":{\"code\",\"message\"}}`. Codes are stable, \
            messages are for people. Ids are strings. Instants are UTC with milliseconds. Bodies may carry unknown \
            keys; they are ignored. A body of at most 1 MiB is taken, and no body counts as `{}`. \
            Answers to calls with a token tell in `X-RateLimit-Limit`, `-Remaining` and `-Reset` what is left of its budget.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
        contact(),
    ),
    components(schemas(Failure)),
    modifiers(&Schemes),
    paths(
        routes::health::health,
        routes::health::ready,
        routes::workspaces::create,
        routes::workspaces::by_name,
        routes::workspaces::delete_by_id,
        routes::workspaces::info,
        routes::workspaces::update,
        routes::workspaces::delete,
        routes::observer_tokens::create,
        routes::observer_tokens::list,
        routes::observer_tokens::get,
        routes::observer_tokens::update,
        routes::observer_tokens::rotate,
        routes::observer_tokens::revoke,
        routes::activity::system_prompt,
        routes::activity::set_system_prompt,
        routes::activity::activity,
        routes::insight::metrics,
        routes::insight::trace,
        routes::usage::usage,
        routes::activity::console_messages,
        routes::activity::stats,
        routes::activity::console_agents,
        routes::activity::costs,
        routes::operator::create_workspace,
        routes::operator::quotas,
        routes::operator::set_quotas,
        routes::operator::signing_keys,
        routes::operator::rotate_signing_key,
        routes::operator::retire_signing_key,
        routes::agents::register,
        routes::agents::list,
        routes::agents::presence,
        routes::agents::heartbeat,
        routes::agents::disconnect,
        routes::agents::get,
        routes::agents::update,
        routes::agents::delete,
        routes::agents::rotate_token,
        routes::agents::me,
        routes::spawn::spawn,
        routes::spawn::release,
        routes::spawn::release_exact,
        routes::channels::create,
        routes::channels::list,
        routes::channels::get,
        routes::channels::update,
        routes::channels::archive,
        routes::channels::set_topic,
        routes::channels::join,
        routes::channels::leave,
        routes::channels::invite,
        routes::channels::members,
        routes::channels::mute,
        routes::channels::unmute,
        routes::inbox::read_status,
        routes::messages::of_channel,
        routes::messages::get,
        routes::messages::replies,
        routes::messages::read,
        routes::messages::update,
        routes::inbox::readers,
        routes::inbox::reactions,
        routes::inbox::react,
        routes::inbox::unreact,
        routes::inbox::get,
        routes::activity::search,
        routes::send::to_channel,
        routes::send::reply,
        routes::send::dm,
        routes::send::to_conversation,
        routes::dms::conversations,
        routes::dms::messages,
        routes::dms::create_group,
        routes::dms::add_participant,
        routes::dms::remove_participant,
        routes::dms::all,
        routes::dms::any_messages,
        routes::dead_letters::list,
        routes::dead_letters::summary,
        routes::dead_letters::get,
        routes::dead_letters::redrive,
        routes::dead_letters::progress,
        routes::dead_letters::purge,
        routes::dead_letters::purge_one,
        routes::deliveries::list,
        routes::deliveries::ack,
        routes::deliveries::fail,
        routes::deliveries::defer,
        routes::deliveries::claim,
        routes::deliveries::attempts,
        routes::mailboxes::list,
        routes::actions::define,
        routes::actions::list,
        routes::actions::get,
        routes::actions::delete,
        routes::actions::invoke,
        routes::actions::invoke_on_node,
        routes::actions::invocation,
        routes::actions::complete,
        routes::nodes::enrol,
        routes::nodes::list,
        routes::nodes::get,
        routes::nodes::change,
        routes::nodes::agents,
        routes::nodes::bind,
        routes::nodes::unbind,
        routes::nodes::forget_provider,
        routes::nodes::mint_direct_token,
        routes::files::upload,
        routes::files::complete,
        routes::files::get,
        routes::files::list,
        routes::files::delete,
        routes::files::receive,
        routes::files::send,
        routes::webhooks::create,
        routes::webhooks::list,
        routes::webhooks::delete,
        routes::webhooks::receive,
        routes::subscriptions::create,
        routes::subscriptions::list,
        routes::subscriptions::get,
        routes::subscriptions::delete,
        routes::subscriptions::deliveries,
        routes::subscriptions::replay,
        routes::subscriptions::replay_since,
        routes::triggers::create,
        routes::triggers::list,
        routes::triggers::get,
        routes::triggers::update,
        routes::triggers::delete,
        routes::session_events::report,
        routes::session_events::list,
        observe::socket::upgrade,
        observe::log::page,
        observe::sse::stream,
        routes::reference::openapi,
        routes::reference::page,
        console::console,
        console::console_file,
        node::upgrade::upgrade,
    )
)]
struct Handlers;

/// The header of routes that take a `KeyedBody`.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Header)]
pub struct IdempotencyKey {
    /// 1 to 255 visible ASCII characters. The same key with the same body gets the first answer again, for 24 hours,
    /// with the header `Idempotency-Replayed: true`, and nothing is done twice. `X-Idempotency-Key` counts too.
    #[param(rename = "Idempotency-Key", required = false, min_length = 1, max_length = 255, pattern = "^[!-~]+$")]
    _key: Option<String>,
}

/// The kinds of tokens.
struct Schemes;

impl Modify for Schemes {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        for (name, format, description) in [
            ("workspace_key", "rk_live_…", "Administers one workspace. It cannot speak as an agent."),
            ("agent_token", "at_live_…", "Acts as one agent."),
            ("node_token", "nt_live_…", "Opens the socket of one node, and posts for the agents that it hosts."),
            ("observer_token", "ot_live_…", "Reads, within its scopes and filters."),
            (
                "operator",
                "secret or JWT",
                "Runs the installation: the bootstrap secret, or a JWT of the configured OIDC issuer.",
            ),
            ("webhook_token", "wh_live_…", "Posts through one inbound webhook."),
        ] {
            let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format(format);
            components.add_security_scheme(name, SecurityScheme::Http(scheme.description(Some(description)).build()));
        }
    }
}

/// The whole document.
#[must_use]
pub fn document() -> Value {
    let mut document = serde_json::to_value(Handlers::openapi()).unwrap_or_default();
    complete::complete(&mut document, TAGS);
    document
}

/// The document as it is served: compact, made once.
pub(crate) fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| document().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_in_docs_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(file == document(), "docs/openapi.json is stale: run `cargo xtask openapi`");
    }
}
