use relay_engine::error::{Conflict, Denial, Missing};

use super::*;

#[test]
fn codes_and_messages_that_clients_depend_on() {
    let table = [
        (EngineError::Unauthenticated(BadCredential::TokenFormat), 401, "unauthorized", "Invalid token format"),
        (
            EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Workspace }),
            401,
            "unauthorized",
            "Invalid API key",
        ),
        (
            EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Agent }),
            401,
            "agent_token_invalid",
            "Invalid agent token",
        ),
        (EngineError::Forbidden(Denial::AgentTokenRequired), 403, "agent_token_required", "Agent token required"),
        (
            EngineError::Conflict(Conflict::AgentExists("a".into())),
            409,
            "agent_already_exists",
            "Agent \"a\" already exists",
        ),
        (EngineError::NotFound(Missing::Channel("c".into())), 404, "channel_not_found", "Channel \"c\" not found"),
        (EngineError::CommitUnavailable, 503, "database_overloaded", "Storage is unavailable, try again"),
    ];
    for (error, status, code, message) in table {
        let error = ApiError::from(error);
        assert_eq!((error.status.as_u16(), error.code, &*error.message), (status, code, message));
    }
}

#[test]
fn an_unknown_commit_outcome_gets_no_status() {
    assert!(ApiError::from(EngineError::OutcomeUnknown).into_response().extensions().get::<DropConnection>().is_some());
}

#[test]
fn an_outage_sets_retry_after() {
    let response = ApiError::from(EngineError::CommitUnavailable).into_response();
    assert_eq!(response.headers()[RETRY_AFTER], "1");
}
