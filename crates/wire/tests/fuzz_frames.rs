//! Fuzzing of everything that reads text from outside, on the stable toolchain: mutations of valid
//! frames, ids, tokens and keys.
//!
//! Each target runs a fixed number of rounds; `RELAY_FUZZ_SECONDS=600 cargo test -p relay-wire --release
//! --test fuzz_frames` runs each for that long. A failure names its seed; `RELAY_FUZZ_SEED` starts from it.

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use fastrand::Rng;
use relay_domain::{
    DeliveryId, MessageId,
    access::token::{TokenHash, TokenKind},
    names::{contains_nul_escape, exceeds_max_depth, parse_idempotency_key},
};
use relay_wire::nodes::frame::{self, InboundFrame, decode};
use serde_json::Value;

/// Rounds of a target when no time is given: about a second in a debug build.
const ROUNDS: u64 = 30_000;

/// Frames as the published clients send them.
const FRAMES: &[&str] = &[
    r#"{"v":1,"id":"r1","type":"node.register","name":"box-a","node_id":"node_9f","provider":{"name":"broker","instance_id":"b-77"},"capabilities":[{"name":"spawn:claude","kind":"capacity"},{"name":"release","kind":"capacity","global":true,"queue":false,"metadata":{"a":[1,null]}}],"max_agents":0,"tags":["a"],"repo_keys":["o/r"],"version":"relay-broker/12.4.1","resume_cursor":null}"#,
    r#"{"v":1,"id":"sdk-direct-1","type":"node.register","name":"direct-1","node_id":"node_direct_1","capabilities":[],"max_agents":1,"tags":["implicit","direct","sdk"],"version":"sdk-typescript/6.0.2"}"#,
    r#"{"v":1,"type":"node.heartbeat","node_id":"node_9f","load":0.25,"active_agents":1,"handlers_live":false}"#,
    r#"{"v":1,"type":"node.heartbeat","load":null,"name":"n","capabilities":[{"name":"relay:live-agents:v1","metadata":{"names":["a"]}}],"max_agents":1,"version":"12.0.0"}"#,
    r#"{"v":1,"type":"node.deregister","provider":{"name":"p","instance_id":"i"}}"#,
    r#"{"v":1,"id":"a1","type":"agent.register","name":"writer","invocation_id":"inv_1","session_ref":"s","resumable":true,"auto_join_general":false}"#,
    r#"{"v":1,"id":"a2","type":"agent.recover","name":"writer","expected_agent_id":"147298826957365248"}"#,
    r#"{"v":1,"id":"a3","type":"agent.deregister","agent_id":"147298826957365248","name":"writer"}"#,
    r#"{"v":1,"id":"i1","type":"inventory.sync","agents":[{"agent_id":"1","name":"a","invocation_id":"inv_1","session_ref":"s"},{"agent_id":"2","name":"b"}]}"#,
    r#"{"v":1,"type":"delivery.ack","agent":"writer","up_to_seq":18446744073709551615}"#,
    r#"{"v":1,"id":"ß\u00e9\ud83d\ude00","type":"delivery.ack","agent":"日本","up_to_seq":0}"#,
    r#"{"v":1,"id":"m1","type":"message.send","messages":[{"from":"a","to":"b","text":"t"},{"channel":"c","text":"\u0000"},7]}"#,
    r#"{"type":"subscribe","channels":["general"]}"#,
    r#"{"type":"pong"}"#,
];

/// Pieces that parsers trip over.
const PIECES: &[&str] = &[
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "true",
    "-1",
    "1e999",
    "0.5",
    "99999999999999999999",
    "\"v\":1,",
    "\"id\":\"x\",",
    "\"id\":7,",
    "\"type\":\"delivery.ack\"",
    "\u{0}",
    "\u{feff}",
    "\u{10ffff}",
    " ",
    "\n",
    "_r1",
    "del_",
    "at_live_",
];

/// Runs `target` on mutations of `corpus` until the rounds or the seconds are over.
#[expect(clippy::disallowed_methods, reason = "the time of a run is real time")]
fn fuzz(name: &str, corpus: &[&str], target: impl Fn(&str)) {
    let variable = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let until = variable("RELAY_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
    let start = variable("RELAY_FUZZ_SEED").unwrap_or_else(|| u64::from(now) << 20);
    for seed in start.. {
        if until.map_or(seed - start >= ROUNDS, |until| Instant::now() >= until) {
            break;
        }
        let text = mutated(corpus, &mut Rng::with_seed(seed));
        if catch_unwind(AssertUnwindSafe(|| target(&text))).is_err() {
            panic!("{name}: RELAY_FUZZ_SEED={seed} on {text:?}");
        }
    }
}

/// One to six random changes of a random entry.
fn mutated(corpus: &[&str], rng: &mut Rng) -> String {
    let mut text = corpus[rng.usize(..corpus.len())].to_owned();
    for _ in 0..rng.usize(1..=6) {
        let at = boundary(&text, rng.usize(..=text.len()));
        let to = boundary(&text, (at + rng.usize(..=8)).min(text.len())).max(at);
        let piece = PIECES[rng.usize(..PIECES.len())];
        match rng.u8(..7) {
            0 => text.truncate(at),
            1 => text.replace_range(at..to, ""),
            2 => text.insert_str(at, piece),
            3 => text.replace_range(at..to, piece),
            4 => text.insert(at, rng.char(..)),
            5 => {
                let other = corpus[rng.usize(..corpus.len())];
                let from = boundary(other, rng.usize(..=other.len()));
                text.replace_range(at.., &other[from..]);
            }
            _ => text.insert_str(at, &piece.repeat(rng.usize(1..200))),
        }
    }
    text
}

fn boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[test]
fn the_corpus_is_valid() {
    for text in FRAMES {
        let id = serde_json::from_str::<Value>(text).unwrap()["id"].as_str().map(str::to_owned);
        assert_eq!(decode(text).map(|decoded| decoded.id), Ok(id), "{text}");
    }
}

#[test]
fn a_frame_is_decoded_or_refused_with_its_id() {
    fuzz("frames", FRAMES, |text| {
        let parsed: Option<Value> = serde_json::from_str(text).ok();
        let decoded = decode(text);
        let (id, message) = match &decoded {
            Ok(decoded) => (&decoded.id, None),
            Err(refusal) => (&refusal.id, Some(&refusal.message)),
        };
        // A readable id is returned in the refusal, an unreadable one is never invented.
        match &parsed {
            Some(Value::Object(frame)) => assert_eq!(id.as_deref(), frame.get("id").and_then(Value::as_str)),
            Some(_) => assert_eq!((id, decoded.is_err()), (&None, true)),
            // Duplicate keys and unread lone surrogates are where parsers may differ.
            None => {}
        }
        if let Some(message) = message {
            assert!(!message.is_empty() && message.len() < 2048);
            let answer = frame::encode_error(id.as_deref(), "invalid_message", message);
            assert!(serde_json::from_str::<Value>(&answer).is_ok_and(|answer| answer["ok"] == false));
        }
        if let Ok(decoded) = &decoded
            && decoded.frame != InboundFrame::Ignored
        {
            // The posts of a batch are checked one by one.
            let checked_later = matches!(decoded.frame, InboundFrame::MessageSend(_));
            assert!(checked_later || !contains_nul_escape(text.as_bytes()) && !exceeds_max_depth(text.as_bytes()));
            if let Some(frame) = &parsed {
                assert_eq!(frame["v"], 1);
            }
        }
        // The same text is always the same frame.
        assert_eq!(decode(text), decoded);
    });
}

#[test]
fn a_valid_frame_survives_white_space_and_unknown_keys() {
    let mut rng = Rng::with_seed(7);
    for text in FRAMES {
        let plain = decode(text).unwrap();
        let spaced = serde_json::to_string_pretty(&serde_json::from_str::<Value>(text).unwrap()).unwrap();
        // The posts of a batch stay as their client wrote them, white space included.
        if !matches!(plain.frame, InboundFrame::MessageSend(_)) {
            assert_eq!(decode(&format!(" \n{spaced}\t")).as_ref(), Ok(&plain));
        }
        for _ in 0..100 {
            let key: String = (0..rng.usize(3..20)).map(|_| rng.alphanumeric()).collect();
            let unknown = text.replacen('{', &format!(r#"{{"zz-{key}":{{"a":[1,"\"}}"]}},"#), 1);
            assert_eq!(decode(&unknown).as_ref(), Ok(&plain), "{unknown}");
        }
    }
}

#[test]
fn an_id_reads_back_what_it_prints_or_is_invalid() {
    let corpus =
        ["del_147298826957365248_147298826957365249", "del_1_2_r3", "147298826957365248", "9223372036854775807"];
    fuzz("ids", &corpus, |text| {
        if let Ok(id) = text.parse::<DeliveryId>() {
            assert_eq!(id.to_string(), text);
        }
        if let Ok(id) = text.parse::<MessageId>() {
            assert_eq!(id.to_string(), text);
        }
    });
}

#[test]
fn a_token_is_of_the_kind_of_its_prefix_or_none() {
    let corpus = ["rk_live_00112233445566778899aabbccddeeff", "at_live_00", "nt_live_00", "ot_live_00", "wh_live_00"];
    fuzz("tokens", &corpus, |text| {
        if let Some(kind) = TokenKind::from_prefix(text) {
            assert!(text.starts_with(kind.prefix()) && text.len() > kind.prefix().len());
        }
        let hash = TokenHash::from_token(text);
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert!(!text.parse::<TokenHash>().is_ok_and(|hash| !hash.to_string().eq_ignore_ascii_case(text)));
    });
}

#[test]
fn an_idempotency_key_is_visible_ascii_or_none() {
    fuzz("keys", &["k", " 3f2b8c9e-1111-4222-8333-444455556666 ", "relay-spawn:00"], |text| {
        if let Some(key) = parse_idempotency_key(text) {
            assert!((1..=255).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()));
            assert_eq!(parse_idempotency_key(key), Some(key));
        }
    });
}
