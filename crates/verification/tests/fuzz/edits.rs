//! Edits of recorded input, for fuzz targets: flipped bits, cut, repeated, swapped and inserted pieces.
//!
//! Each target runs 1000 cases, and as many as `PROPTEST_CASES` says for a long run.

use std::env;

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Maximum bytes of an edited input.
const MAX_BYTES: usize = 256 << 10;

#[derive(Debug, Clone)]
enum Edit {
    Flip { at: Index, bit: u8 },
    Put { at: Index, bytes: Vec<u8> },
    Cut { at: Index, length: usize },
    Repeat { at: Index, length: usize, times: usize },
    Move { from: Index, to: Index, length: usize },
    Truncate { at: Index },
}

/// Settings of a target.
pub(crate) fn settings() -> ProptestConfig {
    let asked = env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(1000), failure_persistence: None, ..ProptestConfig::default() }
}

/// Up to three seeds one after the other, with up to eight edits. `pieces` are inserted beside random bytes.
pub(crate) fn edited(seeds: &[&[u8]], pieces: &[&[u8]]) -> impl Strategy<Value = Vec<u8>> + use<> {
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|seed| seed.to_vec()).collect();
    let parts = prop::collection::vec(select(seeds), 1..4).prop_map(|parts| parts.concat());
    let edits = prop::collection::vec(edit(pieces), 0..9);
    (parts, edits).prop_map(|(mut bytes, edits)| {
        edits.into_iter().for_each(|edit| apply(&mut bytes, edit));
        bytes
    })
}

fn edit(pieces: &[&[u8]]) -> impl Strategy<Value = Edit> + use<> {
    let pieces: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.to_vec()).collect();
    let bytes = prop_oneof![2 => select(pieces), 1 => prop::collection::vec(any::<u8>(), 1..9)];
    let place = any::<Index>;
    prop_oneof![
        (place(), 0u8..8).prop_map(|(at, bit)| Edit::Flip { at, bit }),
        (place(), bytes).prop_map(|(at, bytes)| Edit::Put { at, bytes }),
        (place(), 1usize..40).prop_map(|(at, length)| Edit::Cut { at, length }),
        (place(), 1usize..40, 2usize..400).prop_map(|(at, length, times)| Edit::Repeat { at, length, times }),
        (place(), place(), 1usize..40).prop_map(|(from, to, length)| Edit::Move { from, to, length }),
        place().prop_map(|at| Edit::Truncate { at }),
    ]
}

fn apply(bytes: &mut Vec<u8>, edit: Edit) {
    let end = |start: usize, length: usize, bytes: &[u8]| (start + length).min(bytes.len());
    match edit {
        Edit::Flip { at, bit } if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        Edit::Flip { .. } => {}
        Edit::Put { at, bytes: put } => {
            let at = at.index(bytes.len() + 1);
            bytes.splice(at..at, put);
        }
        Edit::Cut { at, length } => {
            let at = at.index(bytes.len() + 1);
            bytes.drain(at..end(at, length, bytes));
        }
        Edit::Repeat { at, length, times } => {
            let at = at.index(bytes.len() + 1);
            let end = end(at, length, bytes);
            let repeated = bytes[at..end].repeat(times);
            bytes.splice(at..end, repeated);
            bytes.truncate(MAX_BYTES);
        }
        Edit::Move { from, to, length } => {
            let from = from.index(bytes.len() + 1);
            let moved: Vec<u8> = bytes.drain(from..end(from, length, bytes)).collect();
            let to = to.index(bytes.len() + 1);
            bytes.splice(to..to, moved);
        }
        Edit::Truncate { at } => {
            let length = at.index(bytes.len() + 1);
            bytes.truncate(length);
        }
    }
}
