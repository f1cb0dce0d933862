//! What may be watched, by whom, and how it is resumed.

mod console;
mod events;
mod limits;
mod outages;
mod streams;
mod tokens;
mod views;
