//! Codes of domain enums as constants for the texts of statements.
//!
//! A constant becomes a literal of the statement. A bound value would hide the code from the planner, which then could
//! not use a partial index such as the one over dead letters.

use relay_domain::{
    channels::ChannelKind,
    mailboxes::delivery::{Settlement, SourceKind},
};

pub(crate) const CHANNEL: i16 = ChannelKind::Channel.code();

pub(crate) const MESSAGE_SOURCE: i16 = SourceKind::Message.code();
pub(crate) const ACTION_RESULT_SOURCE: i16 = SourceKind::ActionResult.code();
pub(crate) const NOTICE_SOURCE: i16 = SourceKind::Notice.code();

// Names instead of codes. `as_str` is not const, so a test compares them with their enums.
pub(crate) const WS: &str = "ws";
pub(crate) const HTTP_PUSH: &str = "http_push";
pub(crate) const POLL: &str = "poll";
pub(crate) const DIRECT: &str = "direct";
pub(crate) const BROKER: &str = "broker";

pub(crate) const ACKED: i16 = Settlement::Acked.code();
pub(crate) const FAILED: i16 = Settlement::Failed.code();
pub(crate) const DEFERRED: i16 = Settlement::Deferred.code();
pub(crate) const DEAD_LETTERED: i16 = Settlement::DeadLettered.code();

#[cfg(test)]
mod tests {
    use relay_domain::nodes::{NodeKind, NodeRole};

    #[test]
    fn names_are_those_of_the_enums() {
        assert_eq!(super::WS, NodeKind::Ws.as_str());
        assert_eq!(super::HTTP_PUSH, NodeKind::HttpPush.as_str());
        assert_eq!(super::POLL, NodeKind::Poll.as_str());
        assert_eq!(super::DIRECT, NodeRole::Direct.as_str());
        assert_eq!(super::BROKER, NodeRole::Broker.as_str());
    }
}
