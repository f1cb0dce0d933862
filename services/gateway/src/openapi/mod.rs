//! OpenAPI document: derived from the handlers, completed by `complete`, served at `/openapi.json`.
//!
//! To describe a handler:
//! 1. `#[utoipa::path(post, path = "/v1/…", tag = "channels", security(("workspace_key" = []), ("agent_token" = [])),
//!    request_body = wire::SomeBody, responses((status = 201, body = wire::Some), (status = 409, description =
//!    "some_code, other_code")))]` above it. Path as in the router, tag from `TAGS`. The first line of its doc comment
//!    becomes the summary, the rest the description.
//! 2. A 2xx names the type in `Reply<…>` (`()` when acknowledged, no body for 204); an error lists its codes as its
//!    description. `complete` adds what every route has: path parameters, envelopes, 400 `invalid_request`, 401, 413,
//!    415, 429, 500, 503, and examples. Do not write those.
//! 3. `params(wire::SomeQuery)` for a query, `params(IdempotencyKey)` beside a `KeyedBody`.
//! 4. The wire types derive `ToSchema` (queries `IntoParams` with `#[into_params(parameter_in = Query)]`). Ids of the
//!    domain need `#[schema(value_type = Id)]`, objects `value_type = Object`, words `value_type = words::…`. A field
//!    that is left out instead of null needs `#[schema(nullable = false)]`. `#[schema(example = "…")]` where
//!    `example::EXAMPLES_BY_FIELD` knows no example. Names of wire types are unique, whatever their module.
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

/// Tags in the order of the reference.
const TAGS: &[(&str, &str)] = &[
    ("workspaces", "A workspace is a tenant: every other resource belongs to exactly one."),
    ("agents", "Named recipients with a mailbox: programs, people, parts of systems."),
    ("channels", "Named conversations that agents of a workspace join."),
    ("messages", "Posting and reading messages of channels and threads."),
    ("direct messages", "Conversations between two agents, or in a group."),
    ("deliveries", "Mailboxes of agents: one delivery per message and recipient."),
    ("nodes", "Connections of agents: an agent's own connection, or a broker that hosts many agents."),
    ("actions", "Operations that nodes and agents offer, and their invocations."),
    ("sockets", "WebSockets. Their frames are not part of this document."),
    ("observers", "Read-only tokens, and the live events of a workspace."),
    ("operators", "Administration of the installation."),
    ("files", "Attachments of messages."),
    ("webhooks", "Inbound webhooks for messages, and subscriptions that send events."),
    ("service", "The gateway itself."),
];

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Relay",
        description = "Carries messages between agents. Every response except 204 is JSON with a boolean `ok`: \
            `{\"ok\":true,\"data\":…}`, or `{\"ok\":false,\"error\":{\"code\",\"message\"}}`. Codes are stable, \
            messages are for people. Ids are strings. Instants are UTC with milliseconds. Unknown keys \
            of bodies are ignored. A body has at most 1 MiB, and a missing body counts as `{}`. \
            Responses to requests with a token carry its rate limit in `X-RateLimit-Limit`, `-Remaining` and `-Reset`.",
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
        routes::observers::create,
        routes::observers::list,
        routes::observers::get,
        routes::observers::update,
        routes::observers::rotate,
        routes::observers::revoke,
        routes::workspaces::activity::system_prompt,
        routes::workspaces::activity::set_system_prompt,
        routes::workspaces::activity::activity,
        routes::mailboxes::insight::metrics,
        routes::mailboxes::insight::trace,
        routes::workspaces::usage::usage,
        routes::workspaces::activity::console_messages,
        routes::workspaces::activity::stats,
        routes::workspaces::activity::console_agents,
        routes::workspaces::activity::costs,
        routes::workspaces::operator::create_workspace,
        routes::workspaces::operator::quotas,
        routes::workspaces::operator::set_quotas,
        routes::workspaces::operator::signing_keys,
        routes::workspaces::operator::rotate_signing_key,
        routes::workspaces::operator::retire_signing_key,
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
        routes::agents::spawn::spawn,
        routes::agents::spawn::release,
        routes::agents::spawn::release_exact,
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
        routes::messages::reading::read_status,
        routes::messages::of_channel,
        routes::messages::of_session,
        routes::messages::posting::to_address,
        routes::channels::subscription,
        routes::messages::get,
        routes::messages::replies,
        routes::messages::read,
        routes::messages::update,
        routes::messages::reading::readers,
        routes::messages::reactions::reactions,
        routes::messages::reactions::react,
        routes::messages::reactions::unreact,
        routes::mailboxes::inbox::get,
        routes::search::search,
        routes::messages::posting::to_channel,
        routes::messages::posting::reply,
        routes::messages::batch::post,
        routes::messages::posting::dm,
        routes::messages::posting::to_conversation,
        routes::channels::conversations::conversations,
        routes::channels::conversations::messages,
        routes::channels::conversations::create_group,
        routes::channels::conversations::add_participant,
        routes::channels::conversations::remove_participant,
        routes::channels::conversations::all,
        routes::channels::conversations::any_messages,
        routes::mailboxes::dead_letters::list,
        routes::mailboxes::dead_letters::summary,
        routes::mailboxes::dead_letters::get,
        routes::mailboxes::dead_letters::redrive,
        routes::mailboxes::dead_letters::progress,
        routes::mailboxes::dead_letters::purge,
        routes::mailboxes::dead_letters::purge_one,
        routes::mailboxes::deliveries::list,
        routes::mailboxes::deliveries::ack,
        routes::mailboxes::deliveries::fail,
        routes::mailboxes::deliveries::defer,
        routes::mailboxes::deliveries::claim,
        routes::mailboxes::deliveries::attempts,
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
        routes::nodes::delete,
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
        routes::messages::webhooks::create,
        routes::messages::webhooks::list,
        routes::messages::webhooks::delete,
        routes::messages::webhooks::receive,
        routes::subscriptions::create,
        routes::subscriptions::list,
        routes::subscriptions::get,
        routes::subscriptions::delete,
        routes::subscriptions::deliveries,
        routes::subscriptions::replay,
        routes::subscriptions::replay_since,
        routes::actions::triggers::create,
        routes::actions::triggers::list,
        routes::actions::triggers::get,
        routes::actions::triggers::update,
        routes::actions::triggers::delete,
        routes::agents::session_events::report,
        routes::agents::session_events::list,
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

/// Header of routes that take a `KeyedBody`.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Header)]
pub struct IdempotencyKey {
    /// 1 to 255 visible ASCII characters. A repetition with the same key and body gets the first response again, for 24 hours,
    /// with the header `Idempotency-Replayed: true`. `X-Idempotency-Key` is accepted too.
    #[param(rename = "Idempotency-Key", required = false, min_length = 1, max_length = 255, pattern = "^[!-~]+$")]
    _key: Option<String>,
}

/// Security schemes: one per kind of token.
struct Schemes;

impl Modify for Schemes {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        for (name, format, description) in [
            ("workspace_key", "rk_live_…", "Administers one workspace. It cannot act as an agent."),
            ("agent_token", "at_live_…", "Acts as one agent."),
            ("node_token", "nt_live_…", "Opens the socket of one node, and posts for its agents."),
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

/// Builds the complete document.
#[must_use]
pub fn document() -> Value {
    // Always encodes; tests of the document would fail without it.
    let mut document = serde_json::to_value(Handlers::openapi()).unwrap_or_default();
    complete::complete_document(&mut document, TAGS);
    document
}

/// Returns the document as it is served: compact, built once.
pub(crate) fn document_text() -> &'static str {
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
