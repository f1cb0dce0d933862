//! Routes of the gateway, read from its source, to find gaps in tables and documents.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

/// Returns every `.route(…)` of the gateway as method and anonymised path.
pub fn gateway_routes() -> Result<BTreeSet<(String, String)>> {
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
                        // The fallback answers for methods that must look like an unknown path.
                        for handler in handlers.split(&format!("{method}(")).skip(1) {
                            if !handler.starts_with("middleware::fallback") {
                                found.insert((method.to_uppercase(), anonymize_path(route)));
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Returns the source up to the closing parenthesis of `.route(`.
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

/// Replaces the parameters of a path by `{}`.
#[must_use]
pub fn anonymize_path(path: &str) -> String {
    let segment = |part: &str| if part.starts_with('{') { "{}".to_owned() } else { part.to_owned() };
    path.split('/').map(segment).collect::<Vec<_>>().join("/")
}
