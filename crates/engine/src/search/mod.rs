//! Message search. Handle: [`Search`]; a query: [`queries::MessageSearch`].

pub mod queries;

use crate::core::Core;

/// Handle of search.
#[derive(Clone)]
pub struct Search {
    pub(crate) core: Core,
}
