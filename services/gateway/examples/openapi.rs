//! Prints the OpenAPI document, as `cargo xtask openapi` keeps it in `docs/openapi.json`.

#![expect(clippy::print_stdout, reason = "prints a document")]

fn main() {
    println!("{:#}", relay_gateway::openapi::document());
}
