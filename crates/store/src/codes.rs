//! Codes of domain enums as constants for the texts of statements.
//!
//! A constant becomes a literal of the statement. A bound value would hide the code from the planner, which then could not
//! use a partial index such as the one over dead letters.

use relay_domain::{
    channels::ChannelKind,
    mailboxes::delivery::{Settlement, SourceKind},
};

pub(crate) const CHANNEL: i16 = ChannelKind::Channel.code();

pub(crate) const MESSAGE_SOURCE: i16 = SourceKind::Message.code();
pub(crate) const ACTION_RESULT_SOURCE: i16 = SourceKind::ActionResult.code();
pub(crate) const NOTICE_SOURCE: i16 = SourceKind::Notice.code();

pub(crate) const ACKED: i16 = Settlement::Acked.code();
pub(crate) const FAILED: i16 = Settlement::Failed.code();
pub(crate) const DEFERRED: i16 = Settlement::Deferred.code();
pub(crate) const DEAD_LETTERED: i16 = Settlement::DeadLettered.code();
