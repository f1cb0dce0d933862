//! Rules for the metadata of a workspace: its bounds, and the values that look like credentials. Everyone with the
//! workspace key or an observer token reads metadata, so a credential in it leaks. Called when a workspace is created
//! or changed.

use serde_json::{Map, Value};

/// Maximum number of keys, after merging.
pub const MAX_KEYS: usize = 100;
/// Maximum size as JSON, after merging, in bytes.
pub const MAX_BYTES: usize = 16 * 1024;

/// Names of keys that hold credentials, in lower case and without separators. A key holds one if it has one of these
/// names or ends with one, like `github_token` and `dbPassword`; a final `s` does not count.
const CREDENTIAL_KEYS: [&str; 15] = [
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "privatekey",
    "secretkey",
    "authorization",
    "bearer",
    "cookie",
    "connectionstring",
    "credential",
];

/// Prefixes of tokens, each with the minimum number of characters behind it. The engine's own are unmistakable; some
/// others begin ordinary words such as `sk-learn`.
const TOKEN_PREFIXES: [(&[&str], usize); 3] = [
    (&["rk_live_", "rk_test_", "at_live_", "at_test_", "nt_live_", "ot_live_", "wh_live_", "ar_ws_"], 1),
    (
        &[
            "whsec_",
            "sk_live_",
            "sk_test_",
            "ghp_",
            "gho_",
            "ghs_",
            "ghu_",
            "ghr_",
            "github_pat_",
            "glpat-",
            "xoxa-",
            "xoxb-",
            "xoxp-",
            "dop_v1_",
        ],
        8,
    ),
    (&["sk-", "npm_", "pypi-", "hf_", "xapp-", "AKIA", "ASIA", "AIza", "-----BEGIN "], 16),
];

/// Returns the metadata after a change: a `null` deletes its key, other values replace it.
#[must_use]
pub fn merge(mut stored: Map<String, Value>, change: &Map<String, Value>) -> Map<String, Value> {
    for (key, value) in change {
        if value.is_null() {
            stored.remove(key);
        } else {
            stored.insert(key.clone(), value.clone());
        }
    }
    stored
}

/// Returns whether metadata has at most [`MAX_KEYS`] keys and [`MAX_BYTES`] bytes of JSON without white space.
#[must_use]
pub fn is_within_bounds(metadata: &Map<String, Value>) -> bool {
    let bytes = serde_json::to_string(metadata).map_or(usize::MAX, |json| json.len());
    metadata.len() <= MAX_KEYS && bytes <= MAX_BYTES
}

/// Returns the key of the first value that looks like a credential, at any depth.
#[must_use]
pub fn find_credential(metadata: &Map<String, Value>) -> Option<&str> {
    metadata.iter().find_map(|(key, value)| {
        let holds_one = is_credential_key(key) && !is_count(key, value) && has_content(value);
        if holds_one { Some(key.as_str()) } else { find_in_value(key, value) }
    })
}

fn find_in_value<'a>(key: &'a str, value: &'a Value) -> Option<&'a str> {
    match value {
        Value::String(text) => is_token(text).then_some(key),
        Value::Object(nested) => find_credential(nested),
        Value::Array(items) => items.iter().find_map(|item| find_in_value(key, item)),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

/// Returns whether a value contains a text or a number.
fn has_content(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) => false,
        Value::Number(_) => true,
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(items) => items.iter().any(has_content),
        Value::Object(nested) => nested.values().any(has_content),
    }
}

/// Returns whether a value is a number of tokens, such as `max_tokens`.
fn is_count(key: &str, value: &Value) -> bool {
    let name = key.to_lowercase();
    match value {
        Value::Number(_) => name.ends_with("token") || name.ends_with("tokens"),
        Value::String(text) => name.ends_with("tokens") && text.bytes().all(|byte| byte.is_ascii_digit()),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => false,
    }
}

fn is_credential_key(key: &str) -> bool {
    let letters: String = key.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    let singular = letters.strip_suffix('s').unwrap_or(&letters);
    CREDENTIAL_KEYS.iter().any(|name| singular.ends_with(name))
}

fn is_token(text: &str) -> bool {
    let text = text.trim();
    let text = text.strip_prefix("Bearer ").unwrap_or(text);
    let has_prefix = |prefixes: &[&str], least: usize| {
        prefixes.iter().any(|prefix| text.strip_prefix(prefix).is_some_and(|rest| rest.len() >= least))
    };
    TOKEN_PREFIXES.iter().any(|(prefixes, least)| has_prefix(prefixes, *least)) || is_json_web_token(text)
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
            (json!({ "access_token": ["x"] }), "access_token"),
            (json!({ "tokens": ["x"] }), "tokens"),
            (json!({ "api_keys": { "eu": "x" } }), "api_keys"),
            (json!({ "credentials": { "user": "a", "pass": "b" } }), "credentials"),
            (json!({ "secret": { "value": "x" } }), "secret"),
            (json!({ "password": 1234 }), "password"),
            (json!({ "tokens": "12a" }), "tokens"),
            (json!({ "note": token }), "note"),
            (json!({ "notes": ["fine", format!("Bearer {token}")] }), "notes"),
            (json!({ "id": "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.c2ln" }), "id"),
            (json!({ "own": "rk_live_abc" }), "own"),
            (json!({ "chat": "xoxb-1234567890" }), "chat"),
            (json!({ "key": "sk-0123456789abcdef" }), "key"),
        ] {
            assert_eq!(find(&metadata), Some(key), "{metadata}");
        }
    }

    #[test]
    fn a_change_is_merged_and_measured_without_white_space() {
        let map = |value: Value| value.as_object().cloned().unwrap();
        let merged = merge(map(json!({ "a": 1, "b": 2 })), &map(json!({ "b": null, "c": { "d": null } })));
        assert_eq!(merged, map(json!({ "a": 1, "c": { "d": null } })));
        let of_size = |bytes: usize| map(json!({ "k": "x".repeat(bytes - r#"{"k":""}"#.len()) }));
        assert!(is_within_bounds(&of_size(MAX_BYTES)));
        assert!(!is_within_bounds(&of_size(MAX_BYTES + 1)));
    }

    #[test]
    fn ordinary_values_and_removals_are_no_credentials() {
        for metadata in [
            json!({ "token": null, "password": "", "secrets": [], "credentials": { "stored": true } }),
            json!({ "max_tokens": "4096", "token": 5, "total_tokens": 7, "has_secret": true }),
            json!({ "library": "sk-learn", "package": "npm_config", "version": "1.2.3" }),
            json!({ "secretary": "ada", "keyboard": "qwerty", "text": "the password is on the board" }),
        ] {
            assert_eq!(find(&metadata), None, "{metadata}");
        }
    }
}
