//! Secrets that were sealed with a key that is no longer the first one.

use relay_store::{
    sealed::{SealedOf, SealedRow},
    subscriptions::Sealed,
};

use crate::{Engine, EngineResult, push, secrets::Secrets, subscriptions};

/// Nodes, and subscriptions, whose secrets one step seals anew.
const AT_ONCE: i64 = 500;

/// Seals secrets anew, with the first key: once that is done, the others can go. How many, and whether more may wait.
pub(super) async fn step(engine: &Engine) -> EngineResult<(u64, bool)> {
    let secrets = &engine.inner.secrets;
    let former = secrets.former_keys();
    if former.is_empty() {
        return Ok((0, false));
    }
    let rows = engine.store().sealed_with(&former, AT_ONCE).await?;
    let mut done = 0;
    for row in &rows {
        match anew(secrets, row)? {
            Some(fresh) => done += u64::from(engine.store().seal_anew(row, &fresh).await?),
            None => tracing::warn!(key.id = row.sealed.key_id, of = ?row.of, "sealed secrets cannot be opened"),
        }
    }
    if done > 0 {
        tracing::info!(secrets = done, "secrets were sealed with the current key");
    }
    Ok((done, done >= AT_ONCE.unsigned_abs()))
}

/// The same secrets, sealed with the first key. `None` when they cannot be opened.
fn anew(secrets: &Secrets, row: &SealedRow) -> EngineResult<Option<Sealed>> {
    let place = match &row.of {
        SealedOf::Node(node) => push::delivery::place(row.scope, node),
        SealedOf::Subscription(subscription) => subscriptions::place(row.scope, *subscription),
    };
    secrets.open(&place, &row.sealed).map(|plain| secrets.seal(&place, &plain)).transpose()
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, SubscriptionId, WorkspaceId, WorkspaceScope};

    use super::*;

    #[test]
    fn what_a_former_key_has_sealed_is_readable_without_it_afterwards() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let keys = |ids: &[&str]| Secrets::for_test_of(ids);
        let (old, both, new) = (keys(&["a"]), keys(&["b", "a"]), keys(&["b"]));
        assert_eq!((old.former_keys(), both.former_keys()), (vec![], vec!["a"]));
        let (node, subscription) = (NodeId::new("node_1"), SubscriptionId::new(3));
        for (of, place) in [
            (SealedOf::Node(node.clone()), push::delivery::place(scope, &node)),
            (SealedOf::Subscription(subscription), subscriptions::place(scope, subscription)),
        ] {
            let row = SealedRow { scope, of, sealed: old.seal(&place, b"top secret").unwrap() };
            let fresh = anew(&both, &row).unwrap().unwrap();
            assert_eq!(fresh.key_id, "b");
            assert_eq!(new.open(&place, &fresh).as_deref(), Some(&b"top secret"[..]));
            assert_eq!(anew(&new, &row).unwrap(), None, "its key is gone");
        }
    }
}
