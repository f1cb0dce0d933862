//! [`Parts`]: a list whose rows are read and sent a few at a time, so that no list is held in memory as a whole. Used
//! by the reads of message bodies, and turned into responses by the gateway.

use std::{collections::VecDeque, future::Future, time::Duration};

use futures::{StreamExt as _, stream::BoxStream};
use relay_domain::{MessageId, WorkspaceScope};
use relay_tasks::byte_budget::ByteLease;

use crate::{EngineError, EngineResult, core::Core, fair_permits::FairPermit};

/// Bound of the contents of one part; a larger row is a part of its own.
const PART_BYTES: usize = 1024 * 1024;
/// Memory of a row besides its contents.
pub(crate) const ROW_BYTES: usize = 512;
/// A part above this is read with a permit: one for each family, so that large lists leave connections to the others.
pub(crate) const LARGE_PART_BYTES: usize = 64 * 1024;
/// Longest wait for memory, and for a permit, below the time that a request may take.
const MEMORY_WAIT: Duration = Duration::from_secs(15);

/// Memory of a byte of JSON that is held as values: 3 in common objects, 80 in the smallest ones. A list that expects
/// the worst would be read a few rows at a time.
const PARSED_FACTOR: usize = 16;

/// Returns the memory of rows whose JSON is parsed.
pub(crate) fn parsed_sizes<K>(rows: Vec<(K, usize)>) -> Vec<(K, usize)> {
    rows.into_iter().map(|(key, bytes)| (key, bytes.saturating_mul(PARSED_FACTOR))).collect()
}

/// Some rows of a list, and the memory that they take until they are sent.
#[derive(Debug)]
pub struct Part<T> {
    pub rows: Vec<T>,
    pub memory: ByteLease,
}

/// Rows of a list in their order.
pub struct Parts<T> {
    /// The first rows; empty if the list is.
    pub first: Part<T>,
    /// The others, read as they are asked for. `None` if there are none. The part before must be dropped first.
    pub rest: Option<BoxStream<'static, EngineResult<Part<T>>>>,
}

impl<T: Send + 'static> Parts<T> {
    /// Converts each row.
    #[must_use]
    pub fn map<U: Send + 'static>(self, convert: impl Fn(T) -> U + Clone + Send + 'static) -> Parts<U> {
        let convert_part = move |part: Part<T>| Part {
            rows: part.rows.into_iter().map(convert.clone()).collect(),
            memory: part.memory,
        };
        let first = convert_part(self.first);
        let rest = self.rest.map(|rest| rest.map(move |part| part.map(&convert_part)).boxed());
        Parts { first, rest }
    }
}

impl Core {
    /// Waits for memory for the bodies of an answer. It is free again when the lease is dropped.
    ///
    /// # Errors
    /// When other answers, above all of the same family, take too long to be sent.
    pub(crate) async fn reserve_answer(&self, scope: WorkspaceScope, bytes: usize) -> EngineResult<ByteLease> {
        let reserved = self.answers.reserve(self.family(scope).await, bytes);
        tokio::time::timeout(MEMORY_WAIT, reserved).await.map_err(|_| EngineError::Overloaded)
    }

    /// Reads the texts of these rows, each given with the bytes of its text. `slot` names the message of a row, if it
    /// has one, and the place of its text. The text of a removed message stays empty.
    pub(crate) async fn read_texts<T: Send + 'static>(
        &self,
        scope: WorkspaceScope,
        rows: Vec<(T, usize)>,
        slot: impl Fn(&mut T) -> Option<(MessageId, &mut String)> + Copy + Send + Sync + 'static,
    ) -> EngineResult<Parts<T>> {
        let store = self.store.clone();
        let read = move |mut rows: Vec<T>| {
            let store = store.clone();
            async move {
                let ids: Vec<MessageId> = rows.iter_mut().filter_map(|row| Some(slot(row)?.0)).collect();
                let texts = store.message_texts(scope, &ids).await?;
                for (id, text) in rows.iter_mut().filter_map(slot) {
                    // Two rows may show one message: a delivery and its redrive.
                    *text = texts.get(&id).cloned().unwrap_or_default();
                }
                Ok(rows)
            }
        };
        self.read_in_parts(scope, rows, read).await
    }

    /// Reads the contents of these rows, each given with an upper bound of its bytes, a part at a time. `read` returns
    /// the rows with their contents, in order.
    ///
    /// # Errors
    /// When the first part cannot be read. Later failures end the stream.
    pub(crate) async fn read_in_parts<K, T, R, F>(
        &self,
        scope: WorkspaceScope,
        rows: Vec<(K, usize)>,
        read: R,
    ) -> EngineResult<Parts<T>>
    where
        K: Send + 'static,
        T: Send + 'static,
        R: Fn(Vec<K>) -> F + Send + Sync + 'static,
        F: Future<Output = EngineResult<Vec<T>>> + Send + 'static,
    {
        let mut left = VecDeque::from(rows);
        // The first part is read before there is a response, so that its failure still has a status.
        let (keys, bytes) = take_part(&mut left);
        // Memory first: a slow client may hold it for long, and nothing that waits for it may hold a permit.
        let memory = self.reserve_answer(scope, bytes).await?;
        let permit = self.acquire_read_permit(scope, bytes).await?;
        let rows = if keys.is_empty() { Vec::new() } else { read(keys).await? };
        // The rows only need memory from here on; the client may take them slowly.
        drop(permit);
        Ok(self.continue_parts(scope, Part { rows, memory }, left, read))
    }

    /// Returns a list whose first part has been read, with the parts of `left` after it.
    pub(crate) fn continue_parts<K, T, R, F>(
        &self,
        scope: WorkspaceScope,
        first: Part<T>,
        left: VecDeque<(K, usize)>,
        read: R,
    ) -> Parts<T>
    where
        K: Send + 'static,
        T: Send + 'static,
        R: Fn(Vec<K>) -> F + Send + Sync + 'static,
        F: Future<Output = EngineResult<Vec<T>>> + Send + 'static,
    {
        if left.is_empty() {
            return Parts { first, rest: None };
        }
        let state = (left, read, self.clone());
        let rest = futures::stream::try_unfold(state, move |(mut left, read, core)| async move {
            let (keys, bytes) = take_part(&mut left);
            if keys.is_empty() {
                return Ok(None);
            }
            let memory = core.reserve_answer(scope, bytes).await?;
            let permit = core.acquire_read_permit(scope, bytes).await?;
            let rows = read(keys).await?;
            drop(permit);
            Ok(Some((Part { rows, memory }, (left, read, core))))
        });
        Parts { first, rest: Some(rest.boxed()) }
    }

    /// Waits for the permit for a read of this size. Small ones need none.
    async fn acquire_read_permit(&self, scope: WorkspaceScope, bytes: usize) -> EngineResult<Option<FairPermit>> {
        if bytes <= LARGE_PART_BYTES {
            return Ok(None);
        }
        self.large_reads.acquire(self.family(scope).await, MEMORY_WAIT).await.map(Some).ok_or(EngineError::Overloaded)
    }
}

/// Takes the next rows that fit into a part, at least one, and the memory for them.
fn take_part<K>(left: &mut VecDeque<(K, usize)>) -> (Vec<K>, usize) {
    let (mut taken, mut bytes) = (Vec::new(), 0);
    while let Some((_, size)) = left.front() {
        let with_next = bytes + size + ROW_BYTES;
        if with_next > PART_BYTES && !taken.is_empty() {
            break;
        }
        bytes = with_next;
        taken.extend(left.pop_front().map(|(key, _)| key));
    }
    (taken, bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No row is lost or moved, every part makes progress, and only a single row may exceed the bound.
        #[test]
        fn parts_hold_all_rows_in_order(sizes in proptest::collection::vec(0..2 * PART_BYTES, 0..50)) {
            let mut left: VecDeque<(usize, usize)> = sizes.iter().copied().enumerate().collect();
            let mut seen = Vec::new();
            while !left.is_empty() {
                let (keys, bytes) = take_part(&mut left);
                prop_assert!(!keys.is_empty());
                prop_assert!(bytes <= PART_BYTES || keys.len() == 1);
                seen.extend(keys);
            }
            prop_assert_eq!(seen, (0..sizes.len()).collect::<Vec<_>>());
        }
    }
}
