//! The routes of the gateway, from its source: what a table or a document leaves out shows by them.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

/// Every `.route(…)` of the gateway as (method, path with its parameters anonymous).
///
/// # Errors
/// When the source cannot be read.
pub fn routes_of_the_gateway() -> Result<BTreeSet<(String, String)>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../services/gateway/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path)?;
                for part in source.split(".route(").skip(1) {
                    let Some((_, rest)) = part.split_once('"') else { continue };
                    let Some((route, rest)) = rest.split_once('"') else { continue };
                    let handlers = argument(rest);
                    for method in ["get", "post", "put", "patch", "delete", "any"] {
                        // The fallback answers where a path must not seem to exist with this method.
                        for handler in handlers.split(&format!("{method}(")).skip(1) {
                            if !handler.starts_with("middleware::fallback") {
                                found.insert((method.to_uppercase(), anonymous(route)));
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(found)
}

/// The source up to where the parenthesis of `.route(` closes.
fn argument(source: &str) -> &str {
    let mut depth = 1;
    for (at, byte) in source.bytes().enumerate() {
        depth += i32::from(byte == b'(') - i32::from(byte == b')');
        if depth == 0 {
            return &source[..at];
        }
    }
    source
}

/// A path with its parameters as `{}`.
#[must_use]
pub fn anonymous(path: &str) -> String {
    let segment = |part: &str| if part.starts_with('{') { "{}".to_owned() } else { part.to_owned() };
    path.split('/').map(segment).collect::<Vec<_>>().join("/")
}
