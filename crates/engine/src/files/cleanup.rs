//! Files that were never completed, and objects that belong to no file any more.

use std::time::Duration;

use relay_blobs::BlobKey;

use super::{ABANDONED_AFTER, Files};
use crate::{EngineResult, tick::TickOutcome};

const PER_TICK: i64 = 100;
/// A claimed object whose removal failed is due again after this long.
const CLAIM_DURATION: Duration = Duration::from_secs(5 * 60);

impl Files {
    /// Gives up files that were not completed in time, then removes due objects. An object's row is removed after the
    /// object: a crash in between leaves it to the next claim.
    pub async fn remove_unneeded_objects(&self) -> EngineResult<TickOutcome> {
        let store = &self.core.store;
        let given_up = store.expire_pending_files(ABANDONED_AFTER, PER_TICK).await?;
        let due = store.claim_due_objects(CLAIM_DURATION, PER_TICK).await?;
        let more = given_up >= PER_TICK.unsigned_abs() || due.len() as u64 >= PER_TICK.unsigned_abs();
        let mut removed = Vec::with_capacity(due.len());
        let mut failure = None;
        for object in due {
            let key = BlobKey {
                workspace: object.workspace_id.get(),
                file: object.file_id.get(),
                object: object.object_id.get(),
            };
            match self.storage.blobs.delete(key).await {
                Ok(()) => removed.push(object),
                Err(error) => failure = Some(error),
            }
        }
        // Also after a failure, so that the objects that were removed are not claimed again.
        store.delete_objects(&removed).await?;
        match failure {
            Some(error) => Err(error.into()),
            None => Ok(TickOutcome { worked: given_up + removed.len() as u64, more, lag: None }),
        }
    }
}
