//! Rules for the metadata of a workspace: its bounds, and the values that look like credentials. Everyone with the
//! workspace key or an observer token reads metadata, so a credential in it leaks. Called when a workspace is created
//! or changed.

use serde_json::{Map, Value};

/// Maximum number of keys, after merging.
pub const MAX_KEYS: usize = 100;
/// Maximum size as JSON, after merging, in bytes.
pub const MAX_BYTES: usize = 16 * 1024;

/// Names of keys that hold credentials, in lower case and without separators. A key is refused if it has one of these
/// names or ends with one, like `github_token` and `dbPassword`, and its value is a text.
const CREDENTIAL_KEYS: [&str; 12] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "privatekey",
    "secretkey",
    "authorization",
    "credential",
    "credentials",
];

/// Prefixes of tokens: those of the engine, then those of common services.
const TOKEN_PREFIXES: [&str; 22] = [
    "rk_live_",
    "at_live_",
    "nt_live_",
    "ot_live_",
    "wh_live_",
    "whsec_",
    "sk-",
    "sk_live_",
    "sk_test_",
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "npm_",
    "pypi-",
    "AKIA",
    "AIza",
    "-----BEGIN ",
];

/// Minimum number of characters behind a prefix, so that words such as `sk-learn` are no tokens.
const MIN_TOKEN_REST: usize = 16;

/// Returns the key of the first value that looks like a credential, at any depth.
#[must_use]
pub fn find_credential(metadata: &Map<String, Value>) -> Option<&str> {
    metadata.iter().find_map(|(key, value)| match value {
        Value::String(text) => (is_credential_key(key) || is_token(text)).then_some(key.as_str()),
        Value::Object(nested) => find_credential(nested),
        Value::Array(items) => items.iter().find_map(|item| find_in_item(key, item)),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    })
}

fn find_in_item<'a>(key: &'a str, item: &'a Value) -> Option<&'a str> {
    match item {
        Value::String(text) => (is_credential_key(key) || is_token(text)).then_some(key),
        Value::Object(nested) => find_credential(nested),
        Value::Array(items) => items.iter().find_map(|item| find_in_item(key, item)),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

fn is_credential_key(key: &str) -> bool {
    let letters: String = key.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    CREDENTIAL_KEYS.iter().any(|name| letters.ends_with(name))
}

fn is_token(text: &str) -> bool {
    let text = text.trim();
    let text = text.strip_prefix("Bearer ").unwrap_or(text);
    TOKEN_PREFIXES.iter().any(|prefix| text.strip_prefix(prefix).is_some_and(|rest| rest.len() >= MIN_TOKEN_REST))
        || is_json_web_token(text)
}

/// Three parts of base64 text, of which the first is a JSON object.
fn is_json_web_token(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let is_base64 =
        |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    parts.len() == 3 && text.starts_with("eyJ") && parts.iter().all(is_base64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn find(metadata: &Value) -> Option<&str> {
        find_credential(metadata.as_object().unwrap())
    }

    #[test]
    fn values_that_look_like_credentials_are_found_at_any_depth() {
        let token = format!("ghp_{}", "a".repeat(36));
        for (metadata, key) in [
            (json!({ "api_key": "x" }), "api_key"),
            (json!({ "API-Key": "x" }), "API-Key"),
            (json!({ "dbPassword": "x" }), "dbPassword"),
            (json!({ "a": { "b": [{ "client_secret": "x" }] } }), "client_secret"),
            (json!({ "tokens": ["x"], "access_token": ["x"] }), "access_token"),
            (json!({ "note": token }), "note"),
            (json!({ "notes": ["fine", format!("Bearer {token}")] }), "notes"),
            (json!({ "id": "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.c2ln" }), "id"),
            (json!({ "own": format!("rk_live_{}", "0".repeat(32)) }), "own"),
        ] {
            assert_eq!(find(&metadata), Some(key), "{metadata}");
        }
    }

    #[test]
    fn ordinary_values_and_removals_are_no_credentials() {
        for metadata in [
            json!({ "token": null, "password": null }),
            json!({ "max_tokens": "4096", "token": 5, "has_secret": true }),
            json!({ "library": "sk-learn", "package": "npm_config", "version": "1.2.3" }),
            json!({ "secretary": "ada", "keyboard": "qwerty", "text": "the password is on the board" }),
        ] {
            assert_eq!(find(&metadata), None, "{metadata}");
        }
    }
}
