//! Check of the token that opened a socket, before each request: nothing is served with a token that is revoked, or
//! that cannot be checked.

use relay_engine::{EngineError, EngineResult, access::authentication::NodeTokenState};
use relay_wire::nodes::frame::InboundFrame;
use tokio::time::Instant;

use super::{
    control::{ControlContext, Outcome, RESULT_RETRY, Request, RequestEffect, error_reply},
    effects::Close,
    registration::TRY_AGAIN_LATER,
};
use crate::node::{revocation::close_of_revoked, suspension::SUSPENDED_OR_DRAINED};

impl ControlContext {
    /// Returns the outcome of a request that is not to be served. While storage is unavailable, requests wait whose
    /// clients take an error as final: registrations until `until`, results without a reply until the connection ends.
    pub(super) async fn check_token(&self, request: &Request, until: Instant) -> Option<Outcome> {
        let checked = if matches!(request.frame, InboundFrame::Register(_)) {
            let checked = self.retry_until(until, || self.engine.access().check_node_token(self.token)).await;
            let Some(checked) = checked else {
                return Some(Outcome { reply: None, effect: self.registration_failed(None, TRY_AGAIN_LATER) });
            };
            checked
        } else if matches!(request.frame, InboundFrame::ActionResult(_)) && request.id.is_none() {
            self.check_token_of_result().await
        } else {
            self.engine.access().check_node_token(self.token).await
        };
        match (checked, &request.frame) {
            (Ok(NodeTokenState::Valid), _) => None,
            (Ok(NodeTokenState::Revoked), _) => Some(close_with(close_of_revoked(self.node.is_direct()))),
            (Ok(NodeTokenState::SuspendedOrDrained), _) => Some(close_with(SUSPENDED_OR_DRAINED)),
            // The next heartbeat repeats the request.
            (Err(_), InboundFrame::Heartbeat(beat)) => {
                Some(Outcome { reply: None, effect: RequestEffect::ChangeUnchecked(beat.clone()) })
            }
            (Err(error), _) => {
                let reply = error_reply(request.id.as_deref(), &error.into());
                Some(Outcome { reply: Some(reply), effect: RequestEffect::None })
            }
        }
    }

    async fn check_token_of_result(&self) -> EngineResult<NodeTokenState> {
        loop {
            match self.engine.access().check_node_token(self.token).await {
                Err(error) if EngineError::is_transient(&error) => tokio::time::sleep(RESULT_RETRY).await,
                checked => return checked,
            }
        }
    }
}

const fn close_with(close: Close) -> Outcome {
    Outcome { reply: None, effect: RequestEffect::Refused { close } }
}
