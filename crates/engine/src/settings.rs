//! What can be known to be wrong with a setting before anything is started: value parsers for programs' flags.
//! None of them goes to the network or repeats the value, which may be a secret.

use relay_egress::Policy;
use relay_store::Store;

use crate::operators::check_issuer_url;

/// The shortest secret that is taken, in bytes.
pub(crate) const SHORTEST_SECRET: usize = 32;

/// Reads a Postgres URL.
///
/// # Errors
/// When it is none.
pub fn database_url(text: &str) -> Result<String, String> {
    Store::check_url(text)?;
    Ok(text.to_owned())
}

/// Reads a NATS URL, or several separated by commas.
///
/// # Errors
/// When one is none.
pub fn nats_url(text: &str) -> Result<String, String> {
    relay_stream::check_url(text)?;
    Ok(text.to_owned())
}

/// Reads a secret of 32 bytes or more.
///
/// # Errors
/// When it is shorter.
pub fn secret(text: &str) -> Result<String, String> {
    if text.len() < SHORTEST_SECRET {
        return Err(format!("must have at least {SHORTEST_SECRET} bytes"));
    }
    Ok(text.to_owned())
}

/// Reads the URL of an OIDC issuer or of its keys: https, or http on this machine.
///
/// # Errors
/// When it is neither.
pub fn issuer_url(text: &str) -> Result<String, String> {
    check_issuer_url(text)?;
    Ok(text.to_owned())
}

/// Reads the URL of a proxy of the operator's own.
///
/// # Errors
/// When it cannot be called.
pub fn proxy_url(text: &str) -> Result<String, String> {
    Policy::default().vouch(text).map_err(|refusal| refusal.to_string())?;
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_known_to_be_wrong_is_refused() {
        type Reads = fn(&str) -> Result<String, String>;
        let check = |read: Reads, text: &str, good: bool| {
            let said = read(text);
            assert_eq!(said.is_ok(), good, "{text}: {said:?}");
            assert!(said.is_ok() || !said.unwrap_err().contains("sesame"), "{text} is repeated");
        };
        for (text, good) in [
            ("postgres://relay:sesame@db:5432/relay?sslmode=require", true),
            ("postgresql:///relay?host=/run/postgresql", true),
            ("mysql://relay:sesame@db/relay", false),
            ("db:5432/sesame", false),
            ("postgres://relay:sesame@db:port/relay", false),
            ("postgres://relay:sesame@db/relay?sslmode=perhaps", false),
        ] {
            check(database_url, text, good);
        }
        for (text, good) in [
            ("nats://127.0.0.1:4222", true),
            ("a:4222", true),
            ("tls://u:sesame@a:4222,tls://u:sesame@b:4222", true),
            ("nats://a:4222,", false),
            ("http://u:sesame@a:4222", false),
            ("nats://u:sesame@a:port", false),
        ] {
            check(nats_url, text, good);
        }
        check(secret, "0123456789abcdef0123456789abcdef", true);
        check(secret, "sesame", false);
        check(issuer_url, "https://id.example/realm", true);
        check(issuer_url, "http://id.example/realm", false);
        check(proxy_url, "http://proxy.corp:3128/push", true);
        check(proxy_url, "proxy.corp:3128", false);
    }
}
