//! The API as it describes itself.

mod document;
mod fuzzing;
mod reference_page;
