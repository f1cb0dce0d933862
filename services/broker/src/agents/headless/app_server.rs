//! [`AppServer`]: a session of a server that takes messages over HTTP.

use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use url::{Host, Url};

use super::HandoverError;
use crate::{
    agents::AgentError,
    api::types::{AppServerAuth, AppServerConfig, AppServerRelease},
};

const PROMPT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for the request that ends the session.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Session of an app server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct AppServer {
    /// An http or https URL.
    endpoint: String,
    session_id: String,
    auth: AppServerAuth,
    release: AppServerRelease,
}

impl AppServerConfig {
    /// Checks the description.
    pub(crate) fn into_server(self, session_id: Option<&str>) -> Result<AppServer, AgentError> {
        let invalid = |text: &str| AgentError::Invalid(text.to_owned());
        if self.driver.is_some_and(|driver| driver != "app_server") || self.protocol.as_deref() != Some("opencode") {
            return Err(invalid("harnessConfig needs the driver app_server and the protocol opencode"));
        }
        if self.host.and_then(|host| host.ownership).is_some_and(|ownership| ownership != "attached") {
            return Err(invalid("harnessConfig.host.ownership must be attached: the broker starts no server"));
        }
        let endpoint = self.endpoint.as_deref().and_then(|url| Url::parse(url).ok());
        let endpoint = endpoint.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let endpoint = endpoint.ok_or_else(|| invalid("harnessConfig.endpoint must be an http or https URL"))?;
        let session_id = session_id.ok_or_else(|| invalid("harnessConfig.sessionId is needed"))?.to_owned();
        let auth = self.auth.unwrap_or_default();
        let has_credentials = !matches!(auth, AppServerAuth::None) || !endpoint.username().is_empty();
        if has_credentials && endpoint.scheme() == "http" && !is_loopback(&endpoint) {
            return Err(invalid("harnessConfig.auth needs https, or an endpoint on this machine"));
        }
        Ok(AppServer { endpoint: endpoint.into(), session_id, auth, release: self.release })
    }
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

impl AppServer {
    /// Hands a text to the session.
    pub(super) async fn prompt(&self, http: &Client, text: &str) -> Result<(), HandoverError> {
        let body = json!({ "parts": [{ "type": "text", "text": text }] });
        self.call(http, Method::POST, Some("prompt_async"), Some(&body), PROMPT_TIMEOUT).await
    }

    /// Leaves the session as the driver has asked for.
    pub(super) async fn release(&self, http: &Client) -> Result<(), HandoverError> {
        match self.release {
            AppServerRelease::Detach => Ok(()),
            AppServerRelease::Abort => self.call(http, Method::POST, Some("abort"), None, RELEASE_TIMEOUT).await,
            AppServerRelease::Delete => self.call(http, Method::DELETE, None, None, RELEASE_TIMEOUT).await,
        }
    }

    async fn call(
        &self,
        http: &Client,
        method: Method,
        verb: Option<&str>,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<(), HandoverError> {
        let mut request = self.authenticate(http.request(method, self.session_url(verb)?)).timeout(limit);
        if let Some(body) = body {
            request = request.json(body);
        }
        // The URL may hold a user name and password, and the error is logged.
        let answer = request.send().await.map_err(|error| HandoverError::new(error.without_url().to_string()))?;
        if answer.status().is_success() {
            Ok(())
        } else {
            Err(HandoverError::new(format!("the server answers {}", answer.status())))
        }
    }

    fn session_url(&self, verb: Option<&str>) -> Result<Url, HandoverError> {
        let unusable = || HandoverError::new("the endpoint is not a URL with a path".to_owned());
        let mut url = Url::parse(&self.endpoint).map_err(|_| unusable())?;
        let mut segments = url.path_segments_mut().map_err(|()| unusable())?;
        // An endpoint that ends with a slash has an empty last segment.
        segments.pop_if_empty().extend(["session", self.session_id.as_str()]).extend(verb);
        drop(segments);
        Ok(url)
    }

    fn authenticate(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.auth {
            AppServerAuth::None => request,
            AppServerAuth::Bearer { token } => request.bearer_auth(token),
            AppServerAuth::Basic { username, password } => request.basic_auth(username, password.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(config: Value) -> Result<AppServer, String> {
        let config: AppServerConfig = serde_json::from_value(config).map_err(|error| error.to_string())?;
        config.into_server(Some("s/1")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_session_is_below_the_endpoint() {
        let server = server(json!({ "protocol": "opencode", "endpoint": "http://127.0.0.1:4096/base/" }));
        let server = server.expect("a server");
        let url = server.session_url(Some("prompt_async")).expect("a URL");
        assert_eq!(url.as_str(), "http://127.0.0.1:4096/base/session/s%2F1/prompt_async");
        assert_eq!(server.session_url(None).expect("a URL").path(), "/base/session/s%2F1");
    }

    #[test]
    fn credentials_do_not_leave_the_machine_in_the_clear() {
        let with = |endpoint: &str| {
            let auth = json!({ "type": "bearer", "token": "t" });
            server(json!({ "protocol": "opencode", "endpoint": endpoint, "auth": auth }))
        };
        for allowed in ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "https://example.org"] {
            assert!(with(allowed).is_ok(), "{allowed}");
        }
        assert!(with("http://example.org").is_err());
        let owned = json!({ "protocol": "opencode", "endpoint": "http://x", "host": { "ownership": "broker-owned" } });
        assert!(server(owned).is_err_and(|error| error.contains("attached")));
        assert!(server(json!({ "protocol": "other", "endpoint": "http://x" })).is_err());
        assert!(server(json!({ "protocol": "opencode", "endpoint": "file:///x" })).is_err());
    }
}
