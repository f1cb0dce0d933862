//! Pages of mailboxes, as replay and repair read them.

use relay_domain::mailboxes::stream::Seq;
use relay_store::mailboxes::replay::MailboxPage;

use crate::fixture::Database;

const ADA: i64 = 1;
const BOB: i64 = 2;
const EVE: i64 = 3;

/// Agent, head and seqs of a page.
fn outline(page: &MailboxPage) -> (i64, Seq, Vec<Seq>) {
    (page.agent_id.get(), page.head, page.rows.iter().map(|row| row.seq).collect())
}

#[tokio::test]
async fn a_page_has_the_rows_from_its_position_on_and_the_head() {
    let db = Database::fresh().await;
    for (agent, name, deliveries) in [(ADA, "ada", 6), (BOB, "bob", 2), (EVE, "eve", 1)] {
        db.agent(agent, name).await;
        db.deliveries(agent, &vec![60; deliveries]).await;
    }
    db.run("DELETE FROM deliveries WHERE agent_id = 1 AND seq = 3 OR agent_id = 2").await;
    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 3").await;
    let wants = [(ADA, 2), (BOB, 2), (EVE, 1)].map(|(agent, from)| {
        let (scope, agent) = Database::mailbox(agent);
        (scope, agent, from)
    });
    let pages = db.store.mailbox_pages(&wants, 3, db.now - chrono::TimeDelta::days(1)).await.unwrap();
    let outlines: Vec<_> = pages.iter().map(outline).collect();
    assert_eq!(outlines, [(ADA, 6, vec![2, 4, 5]), (BOB, 2, vec![])]);
}
