//! Tokens of file URLs: the holder may upload or download one file for an hour.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use chrono::{DateTime, Utc};
use relay_domain::{FileId, WorkspaceId, WorkspaceScope};

use crate::{EngineError, EngineResult, access::secrets::Secrets, error::Fault};

/// Longer texts are refused unread.
const MAX_TOKEN_LENGTH: usize = 256;
/// Domain separation: signatures for other uses of the key are never valid here.
const CONTEXT: &[u8] = b"relay file address\0";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Upload,
    Download,
}

/// Verified permission of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    pub(crate) scope: WorkspaceScope,
    pub(crate) file: FileId,
}

/// Creates a token: `<key id>.<permission>.<signature>`.
pub(super) fn create_token(
    secrets: &Secrets,
    purpose: Purpose,
    scope: WorkspaceScope,
    file: FileId,
    expires_at: DateTime<Utc>,
) -> EngineResult<String> {
    let body = encode_permission(purpose, scope.workspace_id().get(), file.get(), expires_at.timestamp());
    let key_id = secrets.current_key_id();
    // The current key always signs, so there is a signature.
    let tag = secrets.sign(key_id, &[CONTEXT, &body].concat()).ok_or(EngineError::Internal(Fault::NoRandomness))?;
    Ok(format!("{key_id}.{}.{}", URL_SAFE_NO_PAD.encode(body), URL_SAFE_NO_PAD.encode(tag)))
}

/// Verifies a token: signature, purpose and expiry.
pub(super) fn verify_token(secrets: &Secrets, token: &str, purpose: Purpose, now: DateTime<Utc>) -> Option<Grant> {
    if token.len() > MAX_TOKEN_LENGTH {
        return None;
    }
    let mut parts = token.split('.');
    let (key_id, signed, tag) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let signed = URL_SAFE_NO_PAD.decode(signed).ok()?;
    let tag = URL_SAFE_NO_PAD.decode(tag).ok()?;
    if !secrets.verify(key_id, &[CONTEXT, &signed].concat(), &tag) {
        return None;
    }
    let number = |at: usize| signed.get(at..at + 8)?.try_into().ok().map(i64::from_be_bytes);
    let (workspace, file, expires_at) = (number(1)?, number(9)?, number(17)?);
    // Comparing all bytes also refuses another purpose and trailing data.
    let right = signed == encode_permission(purpose, workspace, file, expires_at) && now.timestamp() < expires_at;
    // The signature is ours, so an authenticated call named this workspace.
    let scope = WorkspaceScope::from_verified_token(WorkspaceId::new(workspace));
    right.then_some(Grant { scope, file: FileId::new(file) })
}

fn encode_permission(purpose: Purpose, workspace: i64, file: i64, expires_at: i64) -> Vec<u8> {
    let purpose = match purpose {
        Purpose::Upload => 1,
        Purpose::Download => 2,
    };
    [&[purpose][..], &workspace.to_be_bytes(), &file.to_be_bytes(), &expires_at.to_be_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::secrets::Secrets;

    #[test]
    fn tokens_are_valid_for_one_purpose_file_and_hour() {
        let secrets = Secrets::for_test("k1");
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1 << 60));
        let file = FileId::new(77);
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        let token = create_token(&secrets, Purpose::Upload, scope, file, at(1000)).unwrap();
        assert_eq!(verify_token(&secrets, &token, Purpose::Upload, at(999)), Some(Grant { scope, file }));
        assert_eq!(verify_token(&secrets, &token, Purpose::Upload, at(1000)), None, "expired");
        assert_eq!(verify_token(&secrets, &token, Purpose::Download, at(0)), None, "another purpose");
        assert_eq!(verify_token(&Secrets::for_test("k2"), &token, Purpose::Upload, at(0)), None, "another engine");
        assert!(!token.contains(['/', '+', '=', '&', '?', '#']), "goes into a query as it is: {token}");
        for at_byte in 0..token.len() {
            let mut bytes = token.clone().into_bytes();
            bytes[at_byte] = if bytes[at_byte] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(verify_token(&secrets, &changed, Purpose::Upload, at(0)), None, "{changed}");
        }
        for junk in ["", ".", "..", "a.b.c", "a.b.c.d", &"x".repeat(5000)] {
            assert_eq!(verify_token(&secrets, junk, Purpose::Upload, at(0)), None);
        }
    }
}
