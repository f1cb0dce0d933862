use super::AckFileRejection::{DeliveryId, EventId, Incomplete, Path, Shape, Status, TooLarge};
use super::*;

const PATH: &str = ".agent-relay/Worker-1/acks/del_1";
const CONTENT: &str = r#"{"delivery_id": "del_1", "event_id": "evt_1", "status": "received"}"#;

fn judge(path: &str, content: &str) -> Result<(), AckFileRejection> {
    AckFile::new("Worker-1", "del_1", "evt_1").judge(path, content.as_bytes())
}

#[test]
fn the_expected_file_is_accepted_in_any_layout() {
    assert_eq!(judge(PATH, CONTENT), Ok(()));
    let layout =
        "\n{ \"note\": [1, {}],\n\t\"status\":\"received\",\"event_id\":\"evt_1\",\"delivery_id\":\"del_1\" }\n";
    assert_eq!(judge(PATH, layout), Ok(()));
}

#[test]
fn another_path_is_refused() {
    for path in [
        ".agent-relay/Worker-2/acks/del_1",
        ".agent-relay/Worker-1/acks/del_2",
        ".agent-relay/Worker-1/acks/../acks/del_1",
        ".agent-relay/Worker-1/acks/del_1.json",
        ".agent-relay/Worker-1/acks/.del_1.tmp",
        "./.agent-relay/Worker-1/acks/del_1",
        "/.agent-relay/Worker-1/acks/del_1",
        ".agent-relay/worker-1/acks/del_1",
        "",
    ] {
        assert_eq!(judge(path, CONTENT), Err(Path), "{path}");
    }
}

#[test]
fn the_first_violated_rule_names_the_reason() {
    let large = format!("{CONTENT}{}", " ".repeat(4096));
    assert_eq!(judge("elsewhere", &large), Err(Path));
    assert_eq!(judge(PATH, &large), Err(TooLarge));
    let exact = format!("{CONTENT}{}", " ".repeat(4096 - CONTENT.len()));
    assert_eq!(judge(PATH, &exact), Ok(()));
    for (content, rejection) in [
        ("", Incomplete),
        (" \n", Incomplete),
        (&CONTENT[..CONTENT.len() - 1], Incomplete),
        (&format!("{CONTENT}x"), Incomplete),
        ("null", Shape),
        ("[]", Shape),
        ("\"received\"", Shape),
        ("{}", DeliveryId),
        (r#"{"delivery_id": 1, "event_id": "evt_1", "status": "received"}"#, DeliveryId),
        (r#"{"delivery_id": "del_2", "event_id": "evt_2", "status": "no"}"#, DeliveryId),
        (r#"{"delivery_id": "del_1", "status": "received"}"#, EventId),
        (r#"{"delivery_id": "del_1", "event_id": "EVT_1", "status": "received"}"#, EventId),
        (r#"{"delivery_id": "del_1", "event_id": "evt_1"}"#, Status),
        (r#"{"delivery_id": "del_1", "event_id": "evt_1", "status": "Received"}"#, Status),
        (r#"{"delivery_id": "del_1", "event_id": "evt_1", "status": true}"#, Status),
    ] {
        assert_eq!(judge(PATH, content), Err(rejection), "{content}");
    }
    assert_eq!(AckFile::new("Worker-1", "del_1", "evt_1").judge(PATH, b"{\"a\": \"\xff\"}"), Err(Incomplete));
}

#[test]
fn names_stay_inside_their_folder() {
    for (agent, folder) in [
        ("Worker-1_a.b", "Worker-1_a.b"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("../x", "..%2Fx"),
        ("a b#c", "a%20b%23c"),
        ("100%", "100%25"),
        ("ü", "%C3%BC"),
        ("", ""),
    ] {
        assert_eq!(folder_name(agent), folder);
    }
    assert_eq!(AckFile::new("a b", "del", "evt").path(), Some(".agent-relay/a%20b/acks/del"));
}

#[test]
fn a_delivery_id_that_is_no_file_name_has_no_ack_file() {
    for id in ["", ".", "..", ".x.tmp", "a/b", "../a", "a\0b", "a\nb", "a\\b", &"x".repeat(256)] {
        let file = AckFile::new("Worker-1", id, "evt_1");
        assert_eq!(file.path(), None, "{id:?}");
        assert_eq!(file.judge(&format!(".agent-relay/Worker-1/acks/{id}"), b"{}"), Err(Path));
    }
}
