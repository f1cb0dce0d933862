use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{FileId, FileObjectId, WorkspaceId, files::FileStatus};
use relay_store::{
    FileObject,
    files::metadata::{Completion, NewFile},
};

use crate::fixture::{Database, WORKSPACE};

const CLAIM: Duration = Duration::from_secs(300);
const HOUR: Duration = Duration::from_secs(3600);

async fn declare(db: &Database, id: i64) -> FileId {
    let (scope, agent_id) = Database::mailbox(1);
    let file_id = FileId::new(id);
    let expires_at = db.now + TimeDelta::hours(1);
    let new =
        NewFile { file_id, filename: "f", content_type: "text/plain", size_bytes: 1, agent_id, at: db.now, expires_at };
    assert!(db.store.create_file(scope, &new, Some(3)).await.unwrap());
    file_id
}

fn ids(objects: &[FileObject]) -> Vec<i64> {
    let mut ids: Vec<i64> = objects.iter().map(|object| object.object_id.get()).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn files_stay_within_the_quota_of_their_workspace() {
    let db = Database::fresh().await;
    db.agent(1, "agent-1").await;
    for id in [10, 11, 12] {
        declare(&db, id).await;
    }
    let (scope, agent_id) = Database::mailbox(1);
    let (file_id, expires_at) = (FileId::new(13), db.now + TimeDelta::hours(1));
    let new =
        NewFile { file_id, filename: "f", content_type: "text/plain", size_bytes: 1, agent_id, at: db.now, expires_at };
    assert!(!db.store.create_file(scope, &new, Some(3)).await.unwrap(), "full");
    db.run("UPDATE files SET status = 'deleted', deleted_at = now() WHERE file_id = 10").await;
    assert!(db.store.create_file(scope, &new, Some(3)).await.unwrap(), "what is deleted counts no more");
}

#[tokio::test]
async fn an_object_goes_unless_its_file_took_it() {
    let db = Database::fresh().await;
    db.agent(1, "agent-1").await;
    let (scope, owner) = Database::mailbox(1);
    let file = declare(&db, 10).await;
    let past = db.now - TimeDelta::hours(1);
    for object in [1, 2, 3].map(FileObjectId::new) {
        assert!(db.store.begin_upload(scope, file, object, past).await.unwrap());
    }
    assert!(db.store.attach_upload(scope, file, FileObjectId::new(1)).await.unwrap());
    assert!(db.store.attach_upload(scope, file, FileObjectId::new(2)).await.unwrap(), "the last upload counts");
    let due = db.store.claim_due_objects(CLAIM, 10).await.unwrap();
    assert_eq!(ids(&due), [1, 3], "the replaced one and the one without an upload");
    assert!(db.store.claim_due_objects(CLAIM, 10).await.unwrap().is_empty(), "claimed");
    assert!(!db.store.attach_upload(scope, file, FileObjectId::new(3)).await.unwrap(), "too late: it is being removed");

    // The process that claimed them has stopped: they are due again.
    db.advance(i64::try_from(CLAIM.as_secs()).unwrap() + 1).await;
    let due = db.store.claim_due_objects(CLAIM, 10).await.unwrap();
    assert_eq!(ids(&due), [1, 3]);
    db.store.delete_objects(&due).await.unwrap();
    assert_eq!(db.number("SELECT count(*) FROM file_objects").await, 1);

    let completed = db.store.complete_file(scope, file, owner, db.now).await.unwrap();
    assert!(matches!(completed, Completion::Completed(row, _) if row.object_id == Some(FileObjectId::new(2))));
    assert!(!db.store.begin_upload(scope, file, FileObjectId::new(4), past).await.unwrap(), "complete");
    assert!(!db.store.attach_upload(scope, file, FileObjectId::new(2)).await.unwrap(), "complete");
}

#[tokio::test]
async fn incomplete_files_are_given_up_and_forgotten() {
    let db = Database::fresh().await;
    db.agent(1, "agent-1").await;
    let (scope, owner) = Database::mailbox(1);
    let (late, kept, young) = (declare(&db, 10).await, declare(&db, 11).await, declare(&db, 12).await);
    let later = db.now + TimeDelta::hours(2);
    for (file, object) in [(late, FileObjectId::new(1)), (kept, FileObjectId::new(2))] {
        assert!(db.store.begin_upload(scope, file, object, later).await.unwrap());
        assert!(db.store.attach_upload(scope, file, object).await.unwrap());
    }
    db.store.complete_file(scope, kept, owner, db.now).await.unwrap();
    db.run("UPDATE files SET expires_at = now() - interval '2 hours' WHERE file_id IN (10, 11)").await;
    assert_eq!(db.store.expire_pending_files(HOUR, 10).await.unwrap(), 1);
    assert_eq!(db.store.expire_pending_files(HOUR, 10).await.unwrap(), 0);
    let status = async |file| db.store.file(scope, file).await.unwrap().map(|row| row.status);
    assert_eq!(status(late).await, Some(FileStatus::Deleted));
    assert_eq!((status(kept).await, status(young).await), (Some(FileStatus::Complete), Some(FileStatus::Pending)));

    db.run("UPDATE files SET deleted_at = now() - interval '40 days' WHERE status = 'deleted'").await;
    assert_eq!(db.store.prune_files(HOUR, 10).await.unwrap(), 0, "not while its bytes are there");
    // `remove_after` was set to now(); the claim wants it in the past.
    let due = db.store.claim_due_objects(CLAIM, 10).await.unwrap();
    let (file_id, object_id) = (FileId::new(10), FileObjectId::new(1));
    assert_eq!(due, [FileObject { workspace_id: WorkspaceId::new(WORKSPACE), file_id, object_id }]);
    db.store.delete_objects(&due).await.unwrap();
    assert_eq!(db.store.prune_files(HOUR, 10).await.unwrap(), 1);
    assert_eq!(status(late).await, None);
}
