//! Files that were never completed, and bytes that no file consists of any more.

use std::time::Duration;

use relay_blobs::BlobKey;

use super::Ticked;
use crate::{Engine, EngineResult, files::GIVEN_UP_AFTER};

/// Files given up, and objects removed, in one tick.
const PER_TICK: i64 = 100;
/// For how long a claimed object is ours. One whose removal failed is due again then.
const CLAIM: Duration = Duration::from_secs(5 * 60);

/// Gives up files that were not completed in time, then removes objects that are due. An object's row goes
/// after the object: whoever dies in between leaves it to the next claim.
pub(super) async fn tick(engine: &Engine) -> EngineResult<Ticked> {
    let store = engine.store();
    let given_up = store.give_up_files(GIVEN_UP_AFTER, PER_TICK).await?;
    let due = store.claim_due_objects(CLAIM, PER_TICK).await?;
    let more = given_up >= PER_TICK.unsigned_abs() || due.len() as u64 >= PER_TICK.unsigned_abs();
    let mut removed = Vec::with_capacity(due.len());
    let mut failure = None;
    for object in due {
        let key = BlobKey { workspace: object.workspace_id, file: object.file_id, object: object.object_id };
        match engine.inner.files.blobs.delete(key).await {
            Ok(()) => removed.push(object),
            Err(error) => failure = Some(error),
        }
    }
    store.forget_objects(&removed).await?;
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(Ticked { worked: given_up + removed.len() as u64, more, lag: None }),
    }
}
