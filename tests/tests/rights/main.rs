//! Rights inside a workspace: the matrix of routes, tokens, rights and filters, and the rules that it cannot express.

mod filters;
mod matrix;
mod nodes;
mod rules;
mod subscriptions;
