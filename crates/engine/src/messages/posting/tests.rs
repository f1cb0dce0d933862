use relay_domain::{ChannelId, files::MAX_ATTACHMENTS, names::MAX_TEXT_BYTES};
use relay_wire::nodes::deliver_frame::FRAME_LIMIT;
use serde_json::{Map, Value};

use super::*;
use crate::messages::fixture::{message, scope};

fn ada() -> AgentCaller {
    let name = "ada".into();
    AgentCaller {
        scope: scope(),
        agent_id: AgentId::new(1),
        name,
        kind: AgentKind::Agent,
        token_generation: 3,
        is_former_token: false,
        rights: Default::default(),
    }
}

/// Audience of ada (1), bob (2) and, with muted notifications, eve (3).
fn audience(channel_kind: ChannelKind) -> Audience {
    let member =
        |id, name: &str, muted| Member { agent_id: AgentId::new(id), name: name.to_owned(), muted, machine: None };
    Audience {
        channel_id: ChannelId::new(10),
        name: "general".to_owned(),
        channel_kind,
        conversation_id: None,
        archived: false,
        members_version: 1,
        members: vec![member(1, "ada", false), member(2, "bob", false), member(3, "eve", true)],
    }
}

#[test]
fn a_message_goes_to_all_but_its_sender_and_muted_members_receive_mentions_only() {
    let (bob, eve) = (AgentId::new(2), AgentId::new(3));
    for (kind, thread, mentions, expected) in [
        (ChannelKind::Channel, None, vec![], vec![(bob, Reason::Message, Mode::Steer)]),
        (
            ChannelKind::Channel,
            None,
            vec!["eve"],
            vec![(bob, Reason::Message, Mode::Steer), (eve, Reason::Mention, Mode::Steer)],
        ),
        // A reply never interrupts, whatever its sender asked for.
        (ChannelKind::Channel, Some(MessageId::new(5)), vec![], vec![(bob, Reason::ThreadReply, Mode::Wait)]),
        (
            ChannelKind::Channel,
            Some(MessageId::new(5)),
            vec!["eve"],
            vec![(bob, Reason::ThreadReply, Mode::Wait), (eve, Reason::Mention, Mode::Wait)],
        ),
        (ChannelKind::Group, None, vec![], vec![(bob, Reason::Dm, Mode::Steer), (eve, Reason::Dm, Mode::Steer)]),
    ] {
        let mentions = mentions.into_iter().map(str::to_owned).collect();
        let posted = Message { thread_id: thread, mentions, ..message(9, "text") };
        let (found, names) = recipients(&audience(kind), &Sender::from(&ada()), &posted, Mode::Steer);
        let found: Vec<_> = found.iter().map(|one| (one.agent_id, one.reason, one.mode)).collect();
        assert_eq!(found, expected, "{kind:?} {thread:?}");
        assert_eq!(names.len(), expected.len());
    }
}

#[test]
fn a_direct_message_names_the_other_agent_and_a_note_to_oneself_its_author() {
    let ada = Sender::from(&ada());
    let mut both = audience(ChannelKind::Direct);
    both.members.truncate(2);
    assert_eq!(direct_recipient(&both, &ada).as_deref(), Some("bob"));
    both.members.truncate(1);
    assert_eq!(direct_recipient(&both, &ada).as_deref(), Some("ada"));
    assert_eq!(direct_recipient(&audience(ChannelKind::Group), &ada), None);
}

#[test]
fn clients_cannot_set_the_metadata_of_the_engine() {
    let data = JsonText::from(serde_json::json!({ "a": 1, "__relaycast_from_address": "eve@box" }));
    let stored = |data| stored_metadata(&audience(ChannelKind::Channel), &Sender::from(&ada()), data);
    assert_eq!(stored(Some(&data)).get(), r#"{"a":1}"#);
    assert_eq!(stored(None).get(), "{}");
}

#[test]
fn targets_are_looked_up_without_their_marks() {
    let name_of = |target: Target| match target.normalize(&ada().name) {
        Ok(Target::Channel(name) | Target::Agent(name)) => Some(name),
        Ok(Target::Conversation(_) | Target::Thread(_)) | Err(_) => None,
    };
    for (target, expected) in [
        (Target::Channel("#general".to_owned()), Some("general")),
        (Target::Agent("@bob".to_owned()), Some("bob")),
        (Target::Agent("bob".to_owned()), Some("bob")),
        (Target::Agent("@self".to_owned()), Some("ada")),
        (Target::Agent("self".to_owned()), Some("self")),
        (Target::Agent(String::new()), None),
    ] {
        assert_eq!(name_of(target.clone()).as_deref(), expected, "{target:?}");
    }
}

#[test]
fn a_key_is_bound_to_the_operation_and_to_the_target_unless_that_is_an_agent() -> EngineResult<()> {
    let key = ClientKey::read("k1", b"{}", &[])?;
    let sender = Sender::from(&ada());
    let hash = |target: Target| target.stored_key(&sender, &key).hash;
    let all = [
        hash(Target::Channel("1".to_owned())),
        hash(Target::Channel("2".to_owned())),
        hash(Target::Conversation("1".to_owned())),
        hash(Target::Thread(MessageId::new(1))),
        hash(Target::Agent("1".to_owned())),
    ];
    for (nth, one) in all.iter().enumerate() {
        assert!(!all[..nth].contains(one), "{nth}");
    }
    // The recipient may have been renamed since, and is part of the body's fingerprint.
    assert_eq!(hash(Target::Agent("1".to_owned())), hash(Target::Agent("2".to_owned())));
    Ok(())
}

#[test]
fn drafts_out_of_bounds_are_refused() {
    let draft = || Draft { text: "hello".to_owned(), ..Draft::default() };
    assert!(check_draft(&draft()).is_ok());
    for (name, refused) in [
        ("empty text", Draft { text: String::new(), ..draft() }),
        ("long text", Draft { text: "a".repeat(MAX_TEXT_BYTES + 1), ..draft() }),
        ("attachments", Draft { attachments: vec!["f".to_owned(); MAX_ATTACHMENTS + 1], ..draft() }),
        ("blocks", Draft { blocks: Some(Value::Object(Map::new()).into()), ..draft() }),
        ("data", Draft { data: Some(Value::Array(Vec::new()).into()), ..draft() }),
        ("ttl", Draft { ttl_ms: Some(0), ..draft() }),
        ("content type", Draft { content_type: Some("a".repeat(129)), ..draft() }),
    ] {
        assert!(check_draft(&refused).is_err(), "{name}");
    }
}

#[test]
fn a_message_that_fits_into_no_frame_is_refused() {
    // A conversation's frame contains the text twice, and each control character takes six bytes.
    let escaped = |length| Message { channel_kind: ChannelKind::Direct, ..message(9, &"\u{1}".repeat(length)) };
    assert!(check_frame(&escaped(ALWAYS_FITS_BYTES)).is_ok(), "the bound below which nothing is encoded holds");
    assert!(check_frame(&escaped(FRAME_LIMIT / 12)).is_err());
    assert!(check_frame(&message(9, &"a".repeat(FRAME_LIMIT / 2))).is_ok());
}
