//! Files: declaration and completion, and the transfer of their bytes over signed URLs. Answers are [`wire::File`].

use axum::{
    body::Body as ResponseBody,
    extract::{FromRequestParts, Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode, Uri,
        header::{
            CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST,
            X_CONTENT_TYPE_OPTIONS,
        },
        request::Parts,
        uri::Authority,
    },
    response::{IntoResponse, Response},
};
use relay_domain::{AgentId, FileId, files::content_disposition};
use relay_engine::{
    EngineError,
    error::Missing,
    files::{DeclareFile, FileWithToken, PAGE, Purpose},
};
use relay_wire::files as wire;

use crate::{
    caller::{Agent, ReaderOrAgent, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
    state::AppState,
};

/// Path of file transfers. The URL contains its own token, so its holder may use it without another one.
pub const TRANSFER_PATH: &str = "/_relayfiles";

/// Declares a file and returns the URL to which its bytes must be uploaded within an hour.
#[utoipa::path(
    post, path = "/v1/files/upload", tag = "files",
    security(("agent_token" = [])), request_body = wire::UploadBody,
    responses((status = 201, body = wire::DeclaredFile), (status = 413, description = "payload_too_large"),
        (status = 429, description = "plan_limit_exceeded")),
)]
#[tracing::instrument(level = "debug", name = "http.files.upload", skip_all)]
pub async fn upload(
    State(state): State<AppState>,
    Agent(caller): Agent,
    base: PublicBase,
    Body(body): Body<wire::UploadBody>,
) -> Result<Reply<wire::DeclaredFile>, ApiError> {
    let request = DeclareFile { filename: body.filename, content_type: body.content_type, size_bytes: body.size_bytes };
    let declared = state.engine.files().declare(&caller, &request).await?;
    // A file that was just declared has a token.
    let upload_url = base.transfer_url(declared.token.as_deref().unwrap_or_default());
    let expires_at = declared.expires_at.into();
    let file = to_file(FileWithToken { token: None, ..declared }, &base);
    Ok(Reply::created(wire::DeclaredFile { file, upload_url, expires_at }))
}

/// Completes a file: its bytes are uploaded and cannot change any more.
#[utoipa::path(
    post, path = "/v1/files/{id}/complete", tag = "files",
    security(("agent_token" = [])),
    responses((status = 200, body = wire::File), (status = 404, description = "file_not_found"), (status = 409, description = "upload_incomplete")),
)]
#[tracing::instrument(level = "debug", name = "http.files.complete", skip_all)]
pub async fn complete(
    State(state): State<AppState>,
    Agent(caller): Agent,
    base: PublicBase,
    Path(id): Path<String>,
) -> Result<Reply<wire::File>, ApiError> {
    let row = state.engine.files().complete(&caller, parse_file_id(&id)?).await?;
    Ok(Reply::ok(to_file(row, &base)))
}

/// Shows a file.
#[utoipa::path(
    get, path = "/v1/files/{id}", tag = "files",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 403, description = "insufficient_scope"), (status = 200, body = wire::File), (status = 404, description = "file_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.files.get", skip_all)]
pub async fn get(
    State(state): State<AppState>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::FILES }>,
    base: PublicBase,
    Path(id): Path<String>,
) -> Result<Reply<wire::File>, ApiError> {
    let row = state.engine.files().get(&caller, parse_file_id(&id)?).await?;
    Ok(Reply::ok(to_file(row, &base)))
}

/// Lists complete files, newest first.
#[utoipa::path(
    get, path = "/v1/files", tag = "files",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::FilesQuery),
    responses((status = 403, description = "insufficient_scope"), (status = 200, body = Vec<wire::File>)),
)]
#[tracing::instrument(level = "debug", name = "http.files.list", skip_all)]
pub async fn list(
    State(state): State<AppState>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::FILES }>,
    base: PublicBase,
    Query(query): Query<wire::FilesQuery>,
) -> Result<Reply<Vec<wire::File>>, ApiError> {
    let limit = page::parse_limit(query.limit.as_deref(), PAGE)?;
    let owner: Option<AgentId> = match query.uploaded_by.as_deref() {
        None | Some("") => None,
        Some(id) => Some(id.parse().map_err(|_| ApiError::invalid_request("uploaded_by must be an agent's id"))?),
    };
    let rows = state.engine.files().list(&caller, owner, limit).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| to_file(row, &base)).collect()))
}

/// Deletes a file of the caller's own.
#[utoipa::path(
    delete, path = "/v1/files/{id}", tag = "files",
    security(("agent_token" = [])),
    responses((status = 204), (status = 403, description = "forbidden"), (status = 404, description = "file_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.files.delete", skip_all)]
pub async fn delete(
    State(state): State<AppState>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    state.engine.files().delete(&caller, parse_file_id(&id)?).await?;
    Ok(NoContent)
}

/// Receives the bytes of a file, exactly as many as declared.
#[utoipa::path(
    put, path = "/_relayfiles", tag = "files", params(wire::TransferQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = wire::Uploaded), (status = 403, description = "forbidden"), (status = 404, description = "file_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.files.receive", skip_all)]
pub async fn receive(
    State(state): State<AppState>,
    Query(query): Query<wire::TransferQuery>,
    request: Request,
) -> Result<Reply<wire::Uploaded>, ApiError> {
    let grant = state.engine.files().grant(&query.token, Purpose::Upload)?;
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let bytes = request.into_body().into_data_stream();
    let row = state.engine.files().upload(grant, announced, bytes).await?;
    Ok(Reply::ok(wire::Uploaded { file_id: row.file_id, size_bytes: row.size_bytes }))
}

/// Sends the bytes of a complete file.
///
/// They are to be saved, not displayed as part of this site.
#[utoipa::path(
    get, path = "/_relayfiles", tag = "files", params(wire::TransferQuery),
    responses(
        (status = 200, description = "the bytes", content_type = "application/octet-stream"),
        (status = 403, description = "forbidden"),
        (status = 404, description = "file_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.files.send", skip_all)]
pub async fn send(
    State(state): State<AppState>,
    Query(query): Query<wire::TransferQuery>,
) -> Result<Response, ApiError> {
    let grant = state.engine.files().grant(&query.token, Purpose::Download)?;
    let file = state.engine.files().download(grant).await?;
    // Stored names and types may hold characters that no header takes.
    let text = |value: &str, otherwise| HeaderValue::from_str(value).unwrap_or(HeaderValue::from_static(otherwise));
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, text(&file.row.content_type, "application/octet-stream"));
    headers.insert(CONTENT_LENGTH, file.row.size_bytes.into());
    headers.insert(CONTENT_DISPOSITION, text(&content_disposition(&file.row.filename), "attachment"));
    // Tenants choose type and contents: a browser must not run them as a page of this origin.
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'; sandbox"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("private, no-store"));
    Ok((StatusCode::OK, headers, ResponseBody::from_stream(file.bytes)).into_response())
}

/// Base of the URLs that this gateway creates: as configured, or as the client reached it.
#[derive(Debug)]
pub struct PublicBase(String);

impl PublicBase {
    fn transfer_url(&self, token: &str) -> String {
        format!("{}{TRANSFER_PATH}?token={token}", self.0)
    }
}

impl FromRequestParts<AppState> for PublicBase {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match &state.public_url {
            Some(url) => Ok(Self(url.to_string())),
            None => base_from_request(&parts.uri, &parts.headers).map(Self),
        }
    }
}

/// Returns the base that the client used. A forged header affects only the client that sent it.
fn base_from_request(uri: &Uri, headers: &HeaderMap) -> Result<String, ApiError> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let authority = match uri.authority() {
        Some(authority) => Some(authority.clone()),
        None => header(HOST.as_str()).and_then(|host| host.parse::<Authority>().ok()),
    };
    let authority = authority.filter(|authority| !authority.as_str().contains('@'));
    let authority = authority.ok_or_else(|| ApiError::invalid_request("The Host header is missing or malformed"))?;
    let scheme = match header("x-forwarded-proto") {
        Some(proto) if proto.eq_ignore_ascii_case("https") => "https",
        _ => "http",
    };
    Ok(format!("{scheme}://{authority}"))
}

fn parse_file_id(text: &str) -> Result<FileId, ApiError> {
    text.parse().map_err(|_| EngineError::NotFound(Missing::File).into())
}

fn to_file(file: FileWithToken, base: &PublicBase) -> wire::File {
    let FileWithToken { row, token, .. } = file;
    let download_url = token.map(|token| base.transfer_url(&token));
    wire::File {
        id: row.file_id,
        file_id: row.file_id,
        filename: row.filename,
        content_type: row.content_type,
        size_bytes: row.size_bytes,
        size: row.size_bytes,
        status: row.status.as_str(),
        uploaded_by: row.uploaded_by,
        url: download_url.clone().unwrap_or_default(),
        download_url,
        created_at: row.created_at.into(),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    #[test]
    fn urls_start_with_the_base_that_the_client_used() {
        let base = |uri: &str, headers: &[(&'static str, &str)]| {
            let headers = headers
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()));
            base_from_request(&uri.parse().unwrap(), &headers.collect()).ok()
        };
        for (uri, headers, expected) in [
            ("/v1/files", &[("host", "127.0.0.1:8787")][..], Some("http://127.0.0.1:8787")),
            ("/v1/files", &[("host", "relay.example"), ("x-forwarded-proto", "https")], Some("https://relay.example")),
            ("/v1/files", &[("host", "relay.example"), ("x-forwarded-proto", "gopher")], Some("http://relay.example")),
            ("http://relay.example/v1/files", &[], Some("http://relay.example")),
            ("/v1/files", &[("host", "a b")], None),
            ("/v1/files", &[("host", "user@relay.example")], None),
            ("/v1/files", &[], None),
        ] {
            assert_eq!(base(uri, headers).as_deref(), expected, "{uri} {headers:?}");
        }
    }
}
