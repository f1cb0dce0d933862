//! Re-encryption of secrets with the current key after a key rotation.

use relay_store::{
    access::encrypted_secrets::{EncryptedSecretRow, SecretOwner},
    subscriptions::definitions::EncryptedSecret,
};

use crate::{Engine, EngineResult, access::secrets::Secrets, push, subscriptions::definitions};

/// Rows per step.
const BATCH_SIZE: i64 = 500;

/// Re-encrypts secrets with the first key; the former keys can be removed when none are left. Returns their number, and
/// true if more may be left.
pub(crate) async fn reencrypt_step(engine: &Engine) -> EngineResult<(u64, bool)> {
    let secrets = &engine.inner.secrets;
    let former = secrets.former_keys();
    if former.is_empty() {
        return Ok((0, false));
    }
    let rows = engine.store().secrets_encrypted_with(&former, BATCH_SIZE).await?;
    let mut done = 0;
    for row in &rows {
        match reencrypt(secrets, row)? {
            // A row that was replaced meanwhile is skipped: the current key has encrypted its new secret.
            Some(fresh) => done += u64::from(engine.store().replace_secret(row, &fresh).await?),
            None => {
                tracing::warn!(key.id = row.sealed.key_id, owner = ?row.owner, "failed to decrypt secrets: unknown key")
            }
        }
    }
    if done > 0 {
        tracing::info!(secrets = done, "secrets were re-encrypted with the current key");
    }
    // Rows that cannot be decrypted do not count: each step finds them again, and the loop would never pause.
    Ok((done, done >= BATCH_SIZE.unsigned_abs()))
}

/// Encrypts the secrets of a row with the first key. `None` when they cannot be decrypted.
fn reencrypt(secrets: &Secrets, row: &EncryptedSecretRow) -> EngineResult<Option<EncryptedSecret>> {
    let place = match &row.owner {
        SecretOwner::Node(node) => push::delivery::secret_context(row.scope, node),
        SecretOwner::Subscription(subscription) => definitions::secret_context(row.scope, *subscription),
    };
    secrets.open(&place, &row.sealed).map(|plain| secrets.seal(&place, &plain)).transpose()
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, SubscriptionId, WorkspaceId, WorkspaceScope};

    use super::*;

    #[test]
    fn reencrypted_secrets_need_no_former_key() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let keys = |ids: &[&str]| Secrets::for_test_keys(ids);
        let (old, both, new) = (keys(&["a"]), keys(&["b", "a"]), keys(&["b"]));
        assert_eq!((old.former_keys(), both.former_keys()), (vec![], vec!["a"]));
        let (node, subscription) = (NodeId::new("node_1"), SubscriptionId::new(3));
        for (owner, place) in [
            (SecretOwner::Node(node.clone()), push::delivery::secret_context(scope, &node)),
            (SecretOwner::Subscription(subscription), definitions::secret_context(scope, subscription)),
        ] {
            let row = EncryptedSecretRow { scope, owner, sealed: old.seal(&place, b"top secret").unwrap() };
            let fresh = reencrypt(&both, &row).unwrap().unwrap();
            assert_eq!(fresh.key_id, "b");
            assert_eq!(new.open(&place, &fresh).as_deref(), Some(&b"top secret"[..]));
            assert_eq!(reencrypt(&new, &row).unwrap(), None, "its key is no longer configured");
        }
    }
}
