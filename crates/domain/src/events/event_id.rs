//! Stable event id of a message: the same message has the same id on every stream.
//!
//! Clients compute the id themselves to detect duplicates, so the algorithm is part of the protocol
//! (docs/protocol/rest.md, "Event identifiers of messages").

use uuid::Uuid;

use crate::MessageId;

const SEEDS: [u32; 4] = [0xdead_beef, 0x41c6_ce57, 0xc0de_cafe, 0x9e37_79b9];
const FACTORS: [u32; 4] = [2_654_435_761, 1_597_334_677, 2_246_822_507, 3_266_489_909];

/// Returns the event id of a message, formatted as a version 5 UUID.
#[must_use]
pub fn stable_event_id(message: MessageId) -> Uuid {
    let input = format!(r#"["relaycast","{message}"]"#);
    let mut lanes = SEEDS;
    // The input is ASCII, so its bytes are its UTF-16 code units.
    for unit in input.bytes() {
        for (lane, factor) in lanes.iter_mut().zip(FACTORS) {
            *lane = (*lane ^ u32::from(unit)).wrapping_mul(factor);
        }
    }
    for i in 0..4 {
        let (own, next) = (lanes[i], lanes[(i + 1) % 4]);
        lanes[i] = (own ^ (own >> 16)).wrapping_mul(FACTORS[2]) ^ (next ^ (next >> 13)).wrapping_mul(FACTORS[3]);
    }
    let mut bytes = [0; 16];
    for (word, lane) in bytes.chunks_exact_mut(4).zip(lanes) {
        word.copy_from_slice(&lane.to_be_bytes());
    }
    // The bits of version 5 and of the variant (RFC 9562).
    bytes[6] = (bytes[6] & 0x0f) | 0x50;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_test_vectors_hold() {
        for (message, expected) in [
            (1, "ead1e16f-bb2b-5745-b779-c7c47e32231b"),
            (147_298_826_957_365_248, "9cce600d-c356-5471-9072-6c0cae7f5a57"),
            (184_467_440_737_095_516, "660c3059-3d4d-5131-9678-c5d3f91b42cf"),
        ] {
            assert_eq!(stable_event_id(MessageId::new(message)).to_string(), expected);
        }
    }
}
