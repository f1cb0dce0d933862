//! Workspaces that the operator has given: one key, or a list in `RELAY_WORKSPACES_JSON`.

use anyhow::{Context as _, Result, anyhow, ensure};
use serde::Deserialize;

/// Most workspaces of one broker. Each has a node socket of its own.
const MAX_WORKSPACES: usize = 16;

/// A workspace to join.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct WorkspaceSpec {
    #[serde(rename = "workspace_id")]
    pub(super) id: Option<String>,
    #[serde(rename = "workspace_alias", default)]
    pub(super) alias: Option<String>,
    /// None: a workspace is created.
    #[serde(rename = "api_key")]
    pub(super) key: Option<String>,
}

/// The workspaces to join, the default one first.
///
/// A key that is not in the list is the only workspace: the list then belongs to the agent that has started this
/// broker.
pub(super) fn given_workspaces(
    key: Option<String>,
    list: Option<&str>,
    default: Option<&str>,
) -> Result<Vec<WorkspaceSpec>> {
    let mut listed = list.map(read_list).transpose()?.unwrap_or_default();
    let is_default = |workspace: &WorkspaceSpec| match (&key, default) {
        // A key outranks the default: an agent that starts this broker passes the default of its own on with the
        // environment.
        (Some(_), _) => workspace.key == key,
        (None, Some(name)) => [&workspace.id, &workspace.alias].into_iter().flatten().any(|known| known == name),
        (None, None) => true,
    };
    let Some(position) = listed.iter().position(is_default) else {
        ensure!(listed.is_empty() || key.is_some(), "RELAY_DEFAULT_WORKSPACE is not in RELAY_WORKSPACES_JSON");
        return Ok(vec![WorkspaceSpec { key, ..WorkspaceSpec::default() }]);
    };
    listed[..=position].rotate_right(1);
    Ok(listed)
}

fn read_list(text: &str) -> Result<Vec<WorkspaceSpec>> {
    // The error itself may quote a key.
    let listed: Vec<WorkspaceSpec> = serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        anyhow!(
            "RELAY_WORKSPACES_JSON is no array of workspace_id, workspace_alias, api_key: line {line}, column {column}"
        )
    })?;
    ensure!(listed.len() <= MAX_WORKSPACES, "RELAY_WORKSPACES_JSON has more than {MAX_WORKSPACES} workspaces");
    for (index, workspace) in listed.iter().enumerate() {
        let id = workspace.id.as_deref().filter(|id| !id.is_empty());
        let id = id.context("RELAY_WORKSPACES_JSON: a workspace has no workspace_id")?;
        ensure!(
            workspace.key.as_deref().is_some_and(|key| !key.is_empty()),
            "RELAY_WORKSPACES_JSON: workspace {id} has no api_key"
        );
        let is_repeated = listed[..index]
            .iter()
            .any(|earlier| earlier.id == workspace.id || (earlier.alias.is_some() && earlier.alias == workspace.alias));
        ensure!(!is_repeated, "RELAY_WORKSPACES_JSON: the id or alias of {id} is there twice");
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"[{"workspace_id":"1","workspace_alias":"one","api_key":"k1"},
        {"workspace_id":"2","api_key":"k2"},{"workspace_id":"3","workspace_alias":"three","api_key":"k3"}]"#;

    fn ids(key: Option<&str>, list: Option<&str>, default: Option<&str>) -> Vec<String> {
        let given = given_workspaces(key.map(str::to_owned), list, default).expect("valid");
        given.into_iter().map(|workspace| workspace.id.unwrap_or_else(|| "?".to_owned())).collect()
    }

    #[test]
    fn the_default_comes_first() {
        assert_eq!(ids(None, Some(LIST), None), ["1", "2", "3"]);
        assert_eq!(ids(None, Some(LIST), Some("three")), ["3", "1", "2"]);
        assert_eq!(ids(None, Some(LIST), Some("2")), ["2", "1", "3"]);
        assert_eq!(ids(Some("k2"), Some(LIST), Some("three")), ["2", "1", "3"]);
        assert_eq!(ids(Some("other"), Some(LIST), None), ["?"], "the list is of another agent");
        assert_eq!(ids(None, None, Some("x")), ["?"]);
    }

    #[test]
    fn a_wrong_list_is_refused_without_its_keys() {
        for list in [
            "{}",
            r#"["rk_live_secret"]"#,
            r#"[{"workspace_id":7,"api_key":"rk_live_secret"}]"#,
            r#"[{"workspace_id":"1","api_key":""}]"#,
            r#"[{"api_key":"rk_live_secret"}]"#,
            r#"[{"workspace_id":"1","api_key":"a"},{"workspace_id":"1","api_key":"rk_live_secret"}]"#,
        ] {
            let error = given_workspaces(None, Some(list), None).expect_err(list).to_string();
            assert!(error.starts_with("RELAY_WORKSPACES_JSON") && !error.contains("secret"), "{error}");
        }
        let error = given_workspaces(None, Some(LIST), Some("four")).expect_err("unknown").to_string();
        assert!(error.contains("RELAY_DEFAULT_WORKSPACE"), "{error}");
    }
}
