//! Prints the OpenAPI document, as `cargo xtask openapi` keeps it in `docs/openapi.json`.

fn main() {
    println!("{:#}", relay_gateway::openapi::document());
}
