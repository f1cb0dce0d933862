//! Pages of mailboxes, as replay and repair read them.

use chrono::TimeDelta;
use relay_domain::mailboxes::{Content, stream::Seq};
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
    let pages = db.store.mailbox_pages(&wants, 3, db.now).await.unwrap();
    let outlines: Vec<_> = pages.iter().map(outline).collect();
    assert_eq!(outlines, [(ADA, 6, vec![2, 4, 5]), (BOB, 2, vec![])]);
}

#[tokio::test]
async fn rows_of_several_days_have_their_contents_and_those_of_long_ago_are_not_read() {
    let db = Database::fresh().await;
    db.run("INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'room', now())").await;
    db.agent(ADA, "ada").await;
    // Written yesterday, today and tomorrow.
    db.deliveries(ADA, &[60; 3]).await;
    for (table, id) in [("messages", "message_id"), ("deliveries", "source_id")] {
        for (seq, days) in [(1, -1), (3, 1)] {
            // The lowest 22 bits of these ids are the seq, those above are milliseconds.
            db.run(&format!(
                "UPDATE {table} SET created_on = created_on + {days}, {id} = {id} + ({days} * 86400000::bigint << 22)
                  WHERE {id} & 4194303 = {seq}"
            ))
            .await;
        }
    }
    let (scope, agent) = Database::mailbox(ADA);
    let read = async |now| db.store.mailbox_pages(&[(scope, agent, 1)], 50, now).await.unwrap();
    let mut pages = read(db.now).await;
    db.store.read_contents(pages.iter_mut().flat_map(|page| &mut page.rows)).await.unwrap();
    let texts: Vec<_> = pages[0].rows.iter().map(|row| row.message().map(|message| message.text.as_str())).collect();
    assert_eq!(texts, [Some("hi"); 3]);
    for days in [-2, 2] {
        let pages = read(db.now + TimeDelta::days(days)).await;
        let outlines: Vec<_> = pages.iter().map(outline).collect();
        assert_eq!(outlines, [(ADA, 3, vec![1, 2, 3])], "a clock that is wrong by {days} days");
    }
    db.advance(8 * 86_400).await;
    let later = read(db.now + TimeDelta::days(8)).await;
    assert_eq!(later.iter().map(outline).collect::<Vec<_>>(), [(ADA, 3, vec![3])]);
    assert!(matches!(later[0].rows[0].content, Content::Unread { .. }));
}
