//! Message search.

pub mod queries;

use crate::{core::Core, fair_places::FairPlaces};

/// Handle of search.
#[derive(Clone)]
pub struct Search {
    pub(crate) core: Core,
    pub(crate) places: FairPlaces,
}
