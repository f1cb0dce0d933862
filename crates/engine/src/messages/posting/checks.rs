//! Checks of posts before they are committed.

use relay_domain::{
    JsonText,
    files::MAX_ATTACHMENTS,
    mailboxes::dead_letter::TTL_BOUNDS,
    messages::Message,
    names::{MAX_TEXT_BYTES, check_json_length, check_length},
};
use relay_wire::{messages::payload, nodes::deliver_frame::FRAME_LIMIT};

use super::Draft;
use crate::{
    EngineError, EngineResult,
    error::{InvalidInput, TooLarge},
};

/// Above this size of text and extras the exact frame is encoded to check its limit. Below it, even the worst JSON
/// escaping of both copies in a conversation's frame fits.
pub(super) const ALWAYS_FITS_BYTES: usize = 60 * 1024;

pub(crate) fn check_draft(draft: &Draft) -> EngineResult<()> {
    if draft.text.is_empty() {
        return Err(EngineError::invalid_request("text must not be empty"));
    }
    check_length("text", &draft.text, MAX_TEXT_BYTES)?;
    if draft.attachments.len() > MAX_ATTACHMENTS {
        return Err(EngineError::Invalid(InvalidInput::Attachments));
    }
    if draft.blocks.as_ref().is_some_and(|blocks| !blocks.is_array()) {
        return Err(EngineError::invalid_request("blocks must be an array"));
    }
    if draft.data.as_ref().is_some_and(|data| !data.is_object()) {
        return Err(EngineError::invalid_request("data must be an object"));
    }
    let (least, most) = TTL_BOUNDS;
    let is_within =
        |ttl: i64| u128::try_from(ttl).is_ok_and(|ttl| (least.as_millis()..=most.as_millis()).contains(&ttl));
    if draft.ttl_ms.is_some_and(|ttl| !is_within(ttl)) {
        let bounds = format!("ttl_ms must be {} to {}", least.as_millis(), most.as_millis());
        return Err(EngineError::invalid_request(bounds));
    }
    check_length("content_type", draft.content_type.as_deref().unwrap_or_default(), 128)?;
    check_json_length("data", draft.data.as_ref().map_or(0, JsonText::byte_len))?;
    Ok(())
}

/// Checks that the message fits into a frame: no message may be accepted that cannot be delivered.
pub(crate) fn check_frame(message: &Message) -> EngineResult<()> {
    if message.held_bytes() <= ALWAYS_FITS_BYTES {
        return Ok(());
    }
    // Names of at most 128 bytes, escaped, and the frame's own keys.
    const FRAME_OVERHEAD: usize = 2048;
    let encoded = payload::payload(message, "").get().len() + FRAME_OVERHEAD;
    if encoded > FRAME_LIMIT { Err(EngineError::TooLarge(TooLarge::Message)) } else { Ok(()) }
}
