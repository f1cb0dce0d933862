use relay_store::{access::encrypted_secrets::SecretOwner, subscriptions::definitions::EncryptedSecret};

use crate::fixture::{Database, WORKSPACE};

/// A node and a subscription with secrets under the key `k1`, and as many under `k2`.
async fn with_secrets() -> Database {
    let db = Database::fresh().await;
    for (number, key) in [(1, "k1"), (2, "k2")] {
        db.run(&format!(
            "INSERT INTO nodes (workspace_id, node_id, name, kind, created_at, sealed_key_id, sealed)
             VALUES ({WORKSPACE}, 'node_{number}', 'n{number}', 'http_push', now(), '{key}', 'node');
             INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at, secret_key_id, sealed)
             VALUES ({WORKSPACE}, {number}, '{{*}}', 'https://127.0.0.1:9', now(), '{key}', 'subscription')"
        ))
        .await;
    }
    db
}

#[tokio::test]
async fn no_row_names_a_former_key_once_all_were_reencrypted() {
    let db = with_secrets().await;
    let mut rows = db.store.secrets_encrypted_with(&["k1", "k0"], 10).await.unwrap();
    rows.sort_by_key(|row| row.sealed.bytes.clone());
    let found: Vec<_> = rows.iter().map(|row| (&row.owner, row.sealed.bytes.as_slice())).collect();
    let (node, subscription) = (&rows[0].owner, &rows[1].owner);
    assert!(matches!((node, subscription), (SecretOwner::Node(_), SecretOwner::Subscription(_))), "{found:?}");
    assert_eq!(found, [(node, &b"node"[..]), (subscription, &b"subscription"[..])]);
    for row in &rows {
        let fresh = EncryptedSecret { key_id: "k2".to_owned(), bytes: b"again".to_vec() };
        assert!(db.store.replace_secret(row, &fresh).await.unwrap());
        assert!(!db.store.replace_secret(row, &fresh).await.unwrap(), "another worker was at it, too");
    }
    assert_eq!(db.store.secrets_encrypted_with(&["k1"], 10).await.unwrap(), []);
    assert_eq!(db.store.secrets_encrypted_with(&["k2"], 10).await.unwrap().len(), 4);
    assert_eq!(db.number("SELECT count(*) FROM nodes WHERE sealed = 'again'").await, 1);
    assert_eq!(db.number("SELECT count(*) FROM subscriptions WHERE sealed = 'again'").await, 1);
}

#[tokio::test]
async fn secrets_that_were_changed_meanwhile_are_left_alone() {
    let db = with_secrets().await;
    let rows = db.store.secrets_encrypted_with(&["k1"], 10).await.unwrap();
    // By a gateway that has not heard of the new key yet.
    db.run("UPDATE nodes SET sealed = 'changed'; UPDATE subscriptions SET sealed = 'changed'").await;
    for row in &rows {
        let fresh = EncryptedSecret { key_id: "k2".to_owned(), bytes: b"again".to_vec() };
        assert!(!db.store.replace_secret(row, &fresh).await.unwrap());
    }
    assert_eq!(db.store.secrets_encrypted_with(&["k1"], 10).await.unwrap().len(), 2);
}
