//! Which requests commit together, and what they are answered.

use relay_domain::WorkspaceScope;
use relay_store::IdempotencyKey;

use super::*;
use crate::messages::fixture::{message, send};

fn keyed(id: i64, key: u8, fingerprint: u8) -> PendingSend {
    let key = IdempotencyKey { hash: [key; 32], fingerprint: [fingerprint; 32] };
    pending(NewSend { key: Some(key), ..send(message(id, "text"), &[]) }).0
}

fn pending(send: NewSend) -> (PendingSend, oneshot::Receiver<Result<CommitReply, EngineError>>) {
    let (reply, answer) = oneshot::channel();
    let family = FamilyId::of_workspace(send.scope.workspace_id(), None);
    (PendingSend { send, family, names: Vec::new(), traceparent: None, reply, sequence: None }, answer)
}

fn id(pending: &PendingSend) -> i64 {
    pending.send.message.id.get()
}

#[test]
fn a_batch_has_each_key_once() {
    let unkeyed = |id| pending(send(message(id, "text"), &[])).0;
    let all = vec![keyed(1, 1, 0), unkeyed(2), keyed(3, 1, 0), unkeyed(4), keyed(5, 2, 0), keyed(6, 1, 9)];
    let folded = fold_equal_keys(all);
    let ids: Vec<_> =
        folded.iter().map(|one| (id(&one.first), one.repeats.iter().map(id).collect::<Vec<_>>())).collect();
    assert_eq!(ids, [(1, vec![3, 6]), (2, vec![]), (4, vec![]), (5, vec![])]);
}

#[test]
fn a_repeat_gets_the_outcome_of_the_first_unless_its_request_differs() {
    let first = keyed(1, 1, 0).send;
    let reply_to = |fingerprint, outcome: SendOutcome| {
        let key = IdempotencyKey { hash: [1; 32], fingerprint: [fingerprint; 32] };
        let (repeat, mut answer) = pending(NewSend { key: Some(key), ..send(message(2, "text"), &[]) });
        reply_to_repeats(vec![repeat], &first, &outcome);
        answer.try_recv().unwrap().unwrap()
    };
    let same = reply_to(0, SendOutcome::Committed(Vec::new()));
    assert!(matches!(same, CommitReply::Repeated { message } if message.id.get() == 1));
    assert!(matches!(reply_to(1, SendOutcome::Committed(Vec::new())), CommitReply::KeyReused));
    assert!(matches!(reply_to(0, SendOutcome::KeyReused), CommitReply::KeyReused));
    assert!(matches!(reply_to(1, SendOutcome::KeyReused), CommitReply::Stale), "it may be the one in storage");
    assert!(matches!(reply_to(0, SendOutcome::Stale), CommitReply::Stale));
}

#[test]
fn nothing_of_a_sequence_is_committed_after_a_break() {
    let sequences = [Arc::new(Sequence::default()), Arc::new(Sequence::default())];
    let (all, mut answers): (Vec<_>, Vec<_>) = [Some(0), Some(1), None, Some(0)]
        .into_iter()
        .zip(1..)
        .map(|(of, id)| {
            let (one, answer) = pending(send(message(id, "text"), &[]));
            (PendingSend { sequence: of.map(|of: usize| Arc::clone(&sequences[of])), ..one }, answer)
        })
        .unzip();
    let kept = refuse_after_break(all);
    assert_eq!(kept.len(), 4, "nothing is broken yet");
    break_sequences(&fold_equal_keys(vec![PendingSend {
        sequence: Some(Arc::clone(&sequences[0])),
        ..pending(send(message(9, "text"), &[])).0
    }]));
    let kept = refuse_after_break(kept);
    assert_eq!(kept.iter().map(id).collect::<Vec<_>>(), [2, 3]);
    assert!(matches!(answers[3].try_recv(), Ok(Ok(CommitReply::Preceded))));
    assert!(answers[1].try_recv().is_err());
}

#[test]
fn a_batch_is_split_by_workspace_in_order() {
    let in_workspace = |id, workspace| {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
        pending(NewSend { scope, ..send(message(id, "text"), &[]) }).0
    };
    let all = vec![in_workspace(1, 8), in_workspace(2, 7), in_workspace(3, 8)];
    let split: Vec<Vec<i64>> =
        split_by_workspace(fold_equal_keys(all)).map(|part| part.iter().map(|one| id(&one.first)).collect()).collect();
    assert_eq!(split, [vec![2], vec![1, 3]]);
}

#[test]
fn a_send_without_recipients_counts_too() {
    let weight = |recipients| recipient_count(&pending(send(message(1, "text"), recipients)).0);
    assert_eq!((weight(&[]), weight(&[2, 3, 4])), (1, 3));
}
