//! The bound on output that was read and not yet delivered, over all terminals of a host.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::watch;

/// Counts undelivered bytes and pauses reading while they exceed the bound.
#[derive(Debug, Clone)]
pub(crate) struct OutputBudget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    used: AtomicUsize,
    exceeded: watch::Sender<bool>,
}

impl OutputBudget {
    pub(crate) fn new(limit: usize) -> Self {
        Self(Arc::new(Shared { limit, used: AtomicUsize::new(0), exceeded: watch::Sender::new(false) }))
    }

    /// Counts `bytes` until the share is dropped. Never refuses: a reader that saw room may exceed the bound by one
    /// chunk.
    pub(crate) fn share(&self, bytes: usize) -> BudgetShare {
        if self.0.used.fetch_add(bytes, Ordering::Relaxed) + bytes > self.0.limit {
            self.0.refresh();
        }
        BudgetShare { budget: self.0.clone(), bytes }
    }

    pub(crate) fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Follows whether reading has to pause.
    pub(crate) fn subscribe(&self) -> watch::Receiver<bool> {
        self.0.exceeded.subscribe()
    }
}

impl Shared {
    /// The comparison happens under the channel's lock, so that the last of two simultaneous changes decides.
    fn refresh(&self) {
        self.exceeded.send_if_modified(|exceeded| {
            let now = self.used.load(Ordering::Relaxed) > self.limit;
            std::mem::replace(exceeded, now) != now
        });
    }
}

/// Bytes of one chunk within the bound.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    budget: Arc<Shared>,
    bytes: usize,
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        // Compares the earlier sum: only a drop from above the bound can end a pause.
        if self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed) > self.budget.limit {
            self.budget.refresh();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_pauses_above_the_bound_and_resumes_at_it() {
        let budget = OutputBudget::new(10);
        let exceeded = budget.subscribe();
        let first = budget.share(10);
        assert!(!*exceeded.borrow());
        let second = budget.share(1);
        assert!(*exceeded.borrow());
        drop(second);
        assert!(!*exceeded.borrow());
        drop(first);
        assert_eq!(budget.used(), 0);
    }
}
