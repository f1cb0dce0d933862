//! Batches of posts, over REST and over node sockets.

use axum::{extract::State, http::Extensions};
use relay_domain::workspaces::rate_limit::RouteClass;
use relay_engine::{
    Engine, EngineError, EngineResult,
    access::{idempotency::ClientKey, limits::RateLimitSubject},
    error::Missing,
    messages::posting::{
        PostedMessage, Target,
        batch::{BatchCaller, BatchPost, BatchTarget},
    },
};
use relay_wire::messages::{
    PostBody,
    batch::{self as wire, AcceptedMessage, BATCH_ONLY_KEYS, BatchBody, BatchOutcomes, MAX_BATCH_POSTS, PostOutcome},
};

use super::posting::to_draft;
use crate::{
    caller::Sender,
    envelope::Reply,
    error::ApiError,
    extract::{BatchRequest, decode_object, parse_object},
    rate_limits::PostCharges,
};

/// Posts up to 100 messages of any kind, in their order.
///
/// Each post is the body of its own route with a target: `channel`, `conversation_id`, `reply_to`, `to` or `address`. It
/// has an outcome of its own, and one that is refused changes nothing for the others. An `idempotency_key` holds for its
/// post, also when that is repeated on its own route. A batch costs one request, and each post what its own route costs.
#[utoipa::path(
    post, path = "/v1/messages/batch", tag = "messages",
    security(("agent_token" = []), ("node_token" = [])), request_body = BatchBody,
    responses(
        (status = 200, body = BatchOutcomes),
        (status = 403, description = "agent_token_required"),
        (status = 413, description = "payload_too_large"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.batch", skip_all)]
pub async fn post(
    State(engine): State<Engine>,
    caller: Sender,
    extensions: Extensions,
    BatchRequest { body, has_key }: BatchRequest,
) -> Result<Reply<BatchOutcomes>, ApiError> {
    if has_key {
        return Err(ApiError::invalid_request("A batch has no Idempotency-Key: give each post an idempotency_key"));
    }
    let (caller, only_channels) = match &caller {
        Sender::Agent(agent) => (BatchCaller::Agent(agent), false),
        // As on the routes of the other kinds.
        Sender::Node(node) => (BatchCaller::Node(node), true),
    };
    post_all(&engine, caller, body, PostRules { only_channels, extensions: Some(&extensions) }).await.map(Reply::ok)
}

/// Rules of the way that a batch came.
pub(crate) struct PostRules<'a> {
    /// The caller posts to channels only.
    pub(crate) only_channels: bool,
    /// Extensions of the request whose answer reports the rate limit.
    pub(crate) extensions: Option<&'a Extensions>,
}

/// Posts a batch and returns its outcomes.
///
/// # Errors
/// When the batch is empty or has too many posts. Nothing was done.
pub(crate) async fn post_all(
    engine: &Engine,
    caller: BatchCaller<'_>,
    body: BatchBody,
    rules: PostRules<'_>,
) -> Result<BatchOutcomes, ApiError> {
    if !(1..=MAX_BATCH_POSTS).contains(&body.messages.len()) {
        return Err(ApiError::invalid_request(format!("messages must be 1 to {MAX_BATCH_POSTS} posts")));
    }
    let (scope, subject) = match caller {
        BatchCaller::Agent(agent) => (agent.scope, RateLimitSubject::Agent(agent.agent_id)),
        BatchCaller::Node(node) => (node.scope, RateLimitSubject::Node(node.node_id.clone())),
    };
    let mut charges = PostCharges::new(engine.rate_limits().clone(), scope, subject, rules.extensions);
    let mut refused = Vec::with_capacity(body.messages.len());
    let mut posts = Vec::with_capacity(body.messages.len());
    for raw in &body.messages {
        let (class, post) = read_post(raw.get(), rules.only_channels);
        // Malformed posts are charged as well: on their own routes the charge precedes the body.
        let outcome = match charges.charge(class).await {
            Ok(()) => post.map(|post| posts.push(post)),
            Err(error) => Err(error),
        };
        refused.push(outcome.err());
    }
    let mut posted = engine.messages().post_batch(caller, posts).await.into_iter();
    let outcome = |refusal: Option<ApiError>| match refusal {
        Some(error) => error.into_outcome(),
        // There is one outcome for each post. Without it the message could have been accepted, so no refusal is
        // claimed.
        None => to_outcome(posted.next().unwrap_or(Err(EngineError::OutcomeUnknown))),
    };
    Ok(BatchOutcomes { outcomes: refused.into_iter().map(outcome).collect() })
}

/// Parses a post, and finds the class of its own route.
fn read_post(text: &str, only_channels: bool) -> (RouteClass, Result<BatchPost, ApiError>) {
    let target = match parse_object::<wire::BatchTarget>(text.as_bytes()) {
        Ok(target) => target,
        Err(error) => return (RouteClass::Plain, Err(error)),
    };
    let class = if target.channel.is_some() {
        RouteClass::ChannelMessage
    } else if target.to.is_some() || target.address.is_some() {
        RouteClass::DirectMessage
    } else {
        RouteClass::Plain
    };
    if only_channels && target.channel.is_none() {
        return (class, Err(ApiError::node_token_forbidden()));
    }
    (class, to_post(text, target))
}

fn to_post(text: &str, target: wire::BatchTarget) -> Result<BatchPost, ApiError> {
    // Its text was checked when the target was read.
    let mut content = decode_object::<PostBody>(text.as_bytes())?;
    let wire::BatchTarget { channel, conversation_id, reply_to, to, address, idempotency_key } = target;
    let target = match (channel, conversation_id, reply_to, to, address) {
        (Some(channel), None, None, None, None) => BatchTarget::To(Target::Channel(channel)),
        (None, Some(conversation), None, None, None) => BatchTarget::To(Target::Conversation(conversation)),
        (None, None, Some(parent), None, None) => {
            let parent = parent.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
            BatchTarget::To(Target::Thread(parent))
        }
        (None, None, None, Some(to), None) => BatchTarget::To(Target::Agent(to)),
        (None, None, None, None, Some(address)) => BatchTarget::Address(address),
        _ => {
            return Err(ApiError::invalid_request(
                "exactly one of channel, conversation_id, reply_to, to and address is required",
            ));
        }
    };
    let read_key = |key: String| ClientKey::read(&key, text.as_bytes(), &BATCH_ONLY_KEYS);
    let key = idempotency_key.map(read_key).transpose()?;
    Ok(BatchPost { target, from: content.from.take(), draft: to_draft(content), key })
}

fn to_outcome(posted: EngineResult<PostedMessage>) -> PostOutcome {
    match posted {
        Ok(posted) => PostOutcome {
            status: Some(201),
            message: Some(AcceptedMessage {
                id: posted.message.id.to_string(),
                conversation_id: posted.message.conversation_id.as_ref().map(ToString::to_string),
                created_at: posted.message.created_at.into(),
                replayed: posted.replayed,
            }),
            error: None,
        },
        Err(error) => ApiError::from(error).into_outcome(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (RouteClass, Result<BatchPost, (u16, String)>) {
        let (class, post) = read_post(text, false);
        let code = |error: ApiError| {
            let outcome = error.into_outcome();
            (outcome.status.unwrap_or_default(), outcome.error.map(|error| error.code).unwrap_or_default())
        };
        (class, post.map_err(code))
    }

    #[test]
    fn a_post_has_the_price_and_the_codes_of_its_own_route() {
        use RouteClass::{ChannelMessage, DirectMessage, Plain};
        for (text, class, expected) in [
            (r#"{"channel":"general","text":"a"}"#, ChannelMessage, None),
            (r#"{"to":"bob","text":"a"}"#, DirectMessage, None),
            (r#"{"address":"bob@direct","text":"a"}"#, DirectMessage, None),
            (r#"{"conversation_id":"dm_1","text":"a","channel":null}"#, Plain, None),
            (r#"{"reply_to":"7","text":"a"}"#, Plain, None),
            (r#"{"reply_to":"seven","text":"a"}"#, Plain, Some((404, "message_not_found"))),
            (r#"{"channel":"general"}"#, ChannelMessage, Some((400, "invalid_request"))),
            (r#"{"channel":"general","to":"bob","text":"a"}"#, ChannelMessage, Some((400, "invalid_request"))),
            (r#"{"text":"a"}"#, Plain, Some((400, "invalid_request"))),
            (r#"{"to":"bob","text":"\u0000"}"#, Plain, Some((400, "invalid_request"))),
            (
                r#"{"to":"bob","text":"a","idempotency_key":"a b"}"#,
                DirectMessage,
                Some((400, "invalid_idempotency_key")),
            ),
            ("7", Plain, Some((400, "invalid_request"))),
            ("null", Plain, Some((400, "invalid_request"))),
        ] {
            let (found, outcome) = read(text);
            assert_eq!(found, class, "{text}");
            let error = outcome.err();
            assert_eq!(error.as_ref().map(|(status, code)| (*status, code.as_str())), expected, "{text}");
        }
    }

    #[test]
    fn a_key_holds_for_the_same_post_on_its_own_route() {
        let key = |text: &str| read(text).1.unwrap().key.unwrap();
        let own = |body: &str| ClientKey::read("k", body.as_bytes(), &[]).unwrap();
        assert_eq!(
            key(r#"{"idempotency_key":"k","channel":"general","text":"a","data":{"b":1}}"#),
            own(r#"{"text":"a","data":{"b":1}}"#)
        );
        assert_eq!(key(r#"{"idempotency_key":"k","to":"bob","text":"a"}"#), own(r#"{"to":"bob","text":"a"}"#));
        assert_ne!(key(r#"{"idempotency_key":"k","to":"bob","text":"a"}"#), own(r#"{"to":"bob","text":"b"}"#));
    }

    #[test]
    fn a_node_token_posts_to_channels_only() {
        let (_, refused) = read_post(r#"{"from":"ann","to":"bob","text":"a"}"#, true);
        assert_eq!(refused.unwrap_err(), ApiError::node_token_forbidden());
        assert!(read_post(r#"{"from":"ann","channel":"general","text":"a"}"#, true).1.is_ok());
    }
}
