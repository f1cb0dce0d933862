//! The OpenAPI document and the reference page.

mod document;
mod fuzzing;
mod reference_page;
