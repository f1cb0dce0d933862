//! What [`ObserverView`](super::ObserverView) lets pass.

use proptest::prelude::*;

use super::*;
use crate::events::kind;

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000 + seconds, 0).expect("an instant")
}

fn view(scopes: &[ObserverScope], filters: ObserverFilters) -> ObserverView {
    ObserverView { scopes: scopes.iter().copied().collect(), filters }
}

fn facts(kind: &str) -> EventFacts<'_> {
    EventFacts {
        kind,
        channel_id: Some(ChannelId::new(7)),
        channel_name: Some("general"),
        conversation_id: None,
        agent_id: Some(AgentId::new(3)),
        created_at: at(0),
    }
}

const KINDS: &[&str] = &[
    kind::MESSAGE_CREATED,
    kind::MESSAGE_UPDATED,
    kind::MESSAGE_REACTED,
    kind::MESSAGE_READ,
    kind::THREAD_REPLY,
    kind::DM_RECEIVED,
    kind::GROUP_DM_RECEIVED,
    kind::AGENT_STATUS_CHANGED,
    kind::AGENT_STATUS_OFFLINE,
    kind::AGENT_IDENTITY_TAKEN_OVER,
    kind::AGENT_EXITED,
    kind::CHANNEL_CREATED,
    kind::CHANNEL_ARCHIVED,
    kind::MEMBER_JOINED,
    kind::MEMBER_CHANNEL_MUTED,
    FILE_UPLOADED,
    kind::WEBHOOK_RECEIVED,
    kind::ACTION_REGISTERED,
    kind::ACTION_DENIED,
    kind::DELIVERY_ACCEPTED,
    kind::DELIVERY_FAILED,
    kind::NODE_ONLINE,
    "harness.log",
];

#[test]
fn a_kind_is_visible_with_its_scope_only() {
    let open = ObserverView::unrestricted().filters;
    for kind in KINDS {
        for conversation_id in [None, Some("dm_1")] {
            let event = EventFacts { conversation_id, ..facts(kind) };
            let needed = required_scope(kind, conversation_id.is_some());
            for scope in ObserverScope::ALL {
                assert_eq!(
                    view(&[*scope], open.clone()).sees_event(&event),
                    *scope == needed,
                    "{kind} of {conversation_id:?} with {scope} alone"
                );
            }
            assert!(ObserverView::unrestricted().sees_event(&event), "{kind} with everything");
        }
    }
}

#[test]
fn scopes_read_back_what_they_print() {
    for scope in ObserverScope::ALL {
        assert_eq!(scope.as_str().parse(), Ok(*scope));
        assert!(scope.as_str().ends_with(":read"));
    }
    for text in ["", "stream", "stream:write", "STREAM:READ", "*", "stream:read "] {
        assert_eq!(text.parse::<ObserverScope>(), Err(UnknownScope), "{text:?}");
    }
    let set: ScopeSet = [ObserverScope::Dms, ObserverScope::Stream, ObserverScope::Dms].into_iter().collect();
    assert_eq!(set.iter().collect::<Vec<_>>(), [ObserverScope::Stream, ObserverScope::Dms]);
    assert!(!set.is_empty() && ScopeSet::default().is_empty());
    let of = ScopeSet::from_scopes;
    assert_eq!((set, ScopeSet::from_bits(set.bits())), (of(&[ObserverScope::Stream, ObserverScope::Dms]), set));
    assert!(
        set.intersects(of(&[ObserverScope::Files, ObserverScope::Dms])) && !set.intersects(of(&[ObserverScope::Files]))
    );
    assert_eq!(ScopeSet::from_bits(u16::MAX), ScopeSet::all());
}

#[test]
fn a_channel_passes_by_id_or_by_name() {
    let all = ObserverScope::ALL;
    let by_id = view(all, ObserverFilters { channel_ids: Some(vec![ChannelId::new(7)]), ..Default::default() });
    let by_name = view(all, ObserverFilters { channel_names: Some(vec!["ops".into()]), ..Default::default() });
    let either = view(
        all,
        ObserverFilters {
            channel_ids: Some(vec![ChannelId::new(7)]),
            channel_names: Some(vec!["ops".into()]),
            ..Default::default()
        },
    );
    for (seven, ops, view) in [(true, false, &by_id), (false, true, &by_name), (true, true, &either)] {
        assert_eq!(view.sees_channel(ChannelId::new(7), "general"), seven);
        assert_eq!(view.sees_channel(ChannelId::new(8), "ops"), ops);
        assert!(!view.sees_channel(ChannelId::new(9), "other"));
        // Events about an unnamed channel are hidden, events about no channel are not.
        let nowhere = |kind| EventFacts { channel_id: None, channel_name: None, ..facts(kind) };
        assert!(!view.sees_event(&nowhere(kind::DELIVERY_DELIVERED)));
        assert!(view.sees_event(&nowhere(kind::AGENT_STATUS_IDLE)));
        // An event that knows the channel's name only.
        assert_eq!(
            view.sees_event(&EventFacts { channel_name: Some("ops"), ..nowhere(kind::MEMBER_JOINED) }),
            ops,
            "by name alone"
        );
    }
}

#[test]
fn direct_messages_require_scope_and_filter() {
    let dm = EventFacts { conversation_id: Some("dm_a"), ..facts(kind::DM_RECEIVED) };
    let filters = |include_dms, ids: Option<&[&str]>| ObserverFilters {
        include_dms,
        dm_conversation_ids: ids.map(|ids| ids.iter().map(ToString::to_string).collect()),
        // The channel filter is about channels.
        channel_names: Some(vec!["ops".into()]),
        ..Default::default()
    };
    let (dms, messages) = (&[ObserverScope::Dms][..], &[ObserverScope::Messages, ObserverScope::Stream][..]);
    for (scopes, filters, seen) in [
        (dms, filters(Some(true), None), true),
        (dms, filters(Some(true), Some(&["dm_b", "dm_a"])), true),
        (dms, filters(Some(true), Some(&["dm_b"])), false),
        (dms, filters(Some(false), None), false),
        (dms, filters(None, None), false),
        (dms, filters(None, Some(&["dm_a"])), false),
        (messages, filters(Some(true), None), false),
    ] {
        let view = view(scopes, filters);
        assert_eq!(view.sees_event(&dm), seen, "{view:?}");
        assert_eq!(view.sees_conversation("dm_a"), seen, "{view:?}");
    }
    let anonymous = EventFacts { conversation_id: None, ..dm };
    assert!(view(dms, filters(Some(true), None)).sees_event(&anonymous));
    assert!(!view(dms, filters(Some(true), Some(&["dm_a"]))).sees_event(&anonymous));
    assert!(!view(dms, filters(None, None)).sees_event(&anonymous));
}

#[test]
fn authors_types_and_age_limit_what_is_seen() {
    let all = ObserverScope::ALL;
    let event = facts(kind::MESSAGE_CREATED);
    for (filters, seen) in [
        (ObserverFilters { agent_ids: Some(vec![AgentId::new(3)]), ..Default::default() }, true),
        (ObserverFilters { agent_ids: Some(vec![AgentId::new(4)]), ..Default::default() }, false),
        (ObserverFilters { event_types: Some(vec![kind::MESSAGE_CREATED.into()]), ..Default::default() }, true),
        (ObserverFilters { event_types: Some(vec![kind::THREAD_REPLY.into()]), ..Default::default() }, false),
        (ObserverFilters { created_after: Some(at(0)), ..Default::default() }, true),
        (ObserverFilters { created_after: Some(at(1)), ..Default::default() }, false),
    ] {
        assert_eq!(view(all, filters.clone()).sees_event(&event), seen, "{filters:?}");
    }
    let listed = view(all, ObserverFilters { agent_ids: Some(vec![AgentId::new(3)]), ..Default::default() });
    assert!(!listed.sees_author(None), "data without an author is hidden by an author filter");
    assert!(view(all, ObserverFilters::default()).sees_author(None));
}

#[test]
fn filters_are_checked() {
    let words = |n: usize| Some((0..n).map(|i| format!("w{i}")).collect::<Vec<_>>());
    let none = ObserverFilters::default;
    for (filters, expected) in [
        (none(), Ok(())),
        (ObserverFilters { channel_names: words(100), ..none() }, Ok(())),
        (ObserverFilters { channel_names: words(101), ..none() }, Err(InvalidFilters::TooMany("channel_names"))),
        (ObserverFilters { channel_ids: Some(vec![]), ..none() }, Err(InvalidFilters::Empty("channel_ids"))),
        (ObserverFilters { agent_ids: Some(vec![]), ..none() }, Err(InvalidFilters::Empty("agent_ids"))),
        (
            ObserverFilters { channel_names: Some(vec!["No Name".into()]), ..none() },
            Err(InvalidFilters::BadEntry("channel_names")),
        ),
        (
            ObserverFilters { event_types: Some(vec!["x".repeat(65)]), ..none() },
            Err(InvalidFilters::BadEntry("event_types")),
        ),
        (
            ObserverFilters { dm_conversation_ids: Some(vec!["a\"b".into()]), ..none() },
            Err(InvalidFilters::BadEntry("dm_conversation_ids")),
        ),
        (
            ObserverFilters {
                channel_ids: Some(vec![ChannelId::new(1); 60]),
                agent_ids: Some(vec![AgentId::new(1); 60]),
                ..none()
            },
            Err(InvalidFilters::TooLong),
        ),
    ] {
        assert_eq!(filters.clone().into_validated().map(|_| ()), expected, "{filters:?}");
    }
    let checked = ObserverFilters { channel_names: Some(vec!["#ops".into()]), ..none() }.into_validated();
    assert_eq!(checked.map(|filters| filters.channel_names), Ok(Some(vec!["ops".to_owned()])));
}

#[test]
fn filters_have_one_json_form() {
    let read = |json: &str| serde_json::from_str::<ObserverFilters>(json).map_err(|error| error.to_string());
    let text = r#"{"channel_ids":["7"],"include_dms":true,"created_after":"2026-03-01T12:00:00.000Z"}"#;
    let filters = read(text).and_then(|filters| filters.into_validated().map_err(|error| error.to_string()));
    let printed = filters.as_ref().map(|filters| serde_json::to_string(filters).expect("JSON"));
    assert_eq!(printed.as_deref(), Ok(text));
    assert_eq!(read(r#"{"channel_ids":null}"#), Ok(ObserverFilters::default()));
    for refused in [
        r#"{"channels":["7"]}"#,
        r#"{"channel_ids":[7]}"#,
        r#"{"channel_ids":["x"]}"#,
        r#"{"include_dms":"yes"}"#,
        r#"{"created_after":"yesterday"}"#,
        "7",
    ] {
        assert!(read(refused).is_err(), "{refused}");
    }
    let scopes: ScopeSet = serde_json::from_str(r#"["dms:read","stream:read"]"#).expect("scopes");
    assert_eq!(serde_json::to_string(&scopes).expect("JSON"), r#"["stream:read","dms:read"]"#);
    assert!(serde_json::from_str::<ScopeSet>(r#"["dms"]"#).is_err());
}

fn any_scopes() -> impl Strategy<Value = ScopeSet> {
    prop::collection::vec(prop::sample::select(ObserverScope::ALL), 0..12).prop_map(|s| s.into_iter().collect())
}

fn any_filters() -> impl Strategy<Value = ObserverFilters> {
    (
        prop::option::of(prop::collection::vec((0i64..4).prop_map(ChannelId::new), 1..3)),
        prop::option::of(prop::collection::vec(prop::sample::select(&["a", "b", "c"][..]), 1..3)),
        prop::option::of(any::<bool>()),
        prop::option::of(prop::collection::vec(prop::sample::select(&["dm_1", "dm_2"][..]), 1..3)),
        prop::option::of(prop::collection::vec((0i64..4).prop_map(AgentId::new), 1..3)),
        prop::option::of(prop::collection::vec(prop::sample::select(KINDS), 1..6)),
        prop::option::of((-2i64..2).prop_map(at)),
    )
        .prop_map(|(channel_ids, names, include_dms, conversations, agent_ids, types, created_after)| {
            let owned = |list: Option<Vec<&str>>| list.map(|list| list.into_iter().map(str::to_owned).collect());
            ObserverFilters {
                channel_ids,
                channel_names: owned(names),
                include_dms,
                dm_conversation_ids: owned(conversations),
                agent_ids,
                event_types: owned(types),
                created_after,
            }
        })
}

fn any_event() -> impl Strategy<Value = EventFacts<'static>> {
    (
        prop::sample::select(KINDS),
        prop::option::of((0i64..4).prop_map(ChannelId::new)),
        prop::option::of(prop::sample::select(&["a", "b", "c"][..])),
        prop::option::of(prop::sample::select(&["dm_1", "dm_2"][..])),
        prop::option::of((0i64..4).prop_map(AgentId::new)),
        (-2i64..2).prop_map(at),
    )
        .prop_map(|(kind, channel_id, channel_name, conversation_id, agent_id, created_at)| EventFacts {
            kind,
            channel_id,
            channel_name,
            conversation_id,
            agent_id,
            created_at,
        })
}

proptest! {
    /// Nothing is ever seen that the holder of the workspace's key does not see, and nothing without the
    /// scope of its kind.
    #[test]
    fn an_observer_sees_a_subset(scopes in any_scopes(), filters in any_filters(), event in any_event()) {
        prop_assert!(ObserverView::unrestricted().sees_event(&event));
        let view = ObserverView { scopes, filters };
        if view.sees_event(&event) {
            prop_assert!(scopes.contains(required_scope(event.kind, event.conversation_id.is_some())));
        }
    }

    /// Validated filters fit into a token.
    #[test]
    fn validated_filters_are_short(filters in any_filters()) {
        if let Ok(filters) = filters.into_validated() {
            let json = serde_json::to_string(&filters).expect("JSON");
            prop_assert!(json.len() <= MAX_FILTERS_BYTES);
            prop_assert_eq!(serde_json::from_str::<ObserverFilters>(&json).ok(), Some(filters));
        }
    }

    /// A further scope never hides, a further filter never shows.
    #[test]
    fn scopes_widen_and_filters_narrow(
        scopes in any_scopes(), more in any_scopes(), filters in any_filters(), extra in any_filters(),
        event in any_event(),
    ) {
        let narrow = ObserverView { scopes, filters: filters.clone() };
        let wide = ObserverView { scopes: scopes.iter().chain(more.iter()).collect(), filters: filters.clone() };
        if narrow.sees_event(&event) {
            prop_assert!(wide.sees_event(&event));
        }
        let mut narrower = filters.clone();
        narrower.agent_ids = narrower.agent_ids.or(extra.agent_ids);
        narrower.event_types = narrower.event_types.or(extra.event_types);
        narrower.created_after = narrower.created_after.or(extra.created_after);
        narrower.dm_conversation_ids = narrower.dm_conversation_ids.or(extra.dm_conversation_ids);
        if !narrower.limits_channels() {
            (narrower.channel_ids, narrower.channel_names) = (extra.channel_ids, extra.channel_names);
        }
        if !narrow.sees_event(&event) {
            let narrowed = ObserverView { scopes, filters: narrower };
            prop_assert!(!narrowed.sees_event(&event));
        }
    }

    /// REST reads and the stream agree about the same message.
    #[test]
    fn reads_and_stream_agree(filters in any_filters(), event in any_event()) {
        let Some((agent_id, channel_id)) = event.agent_id.zip(event.channel_id) else { return Ok(()) };
        let channel_name = event.channel_name.unwrap_or("d");
        let filters = ObserverFilters { event_types: None, ..filters };
        let view = ObserverView { scopes: ScopeSet::all(), filters };
        let message = MessageFacts {
            channel_id, channel_name, conversation_id: event.conversation_id, agent_id, created_at: event.created_at,
        };
        let event = EventFacts { kind: kind::MESSAGE_CREATED, channel_name: Some(channel_name), ..event };
        prop_assert_eq!(view.sees_event(&event), view.sees_message(&message));
    }
}
