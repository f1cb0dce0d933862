//! [`McpFile`]: the file in a project from which an agent program reads its MCP servers.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::McpServer;

/// Place and form of the file. Secrets are not written into it: it names variables of the agent's environment, so that
/// all agents of a project share one content.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct McpFile {
    /// Path below the agent's working directory.
    pub(crate) path: String,
    /// Key of the object with the servers.
    pub(crate) key: String,
    /// Form of one server.
    #[serde(default)]
    form: McpEntryForm,
    /// Reference to a variable; `{name}` stands for it. Absent: the program hands its environment on.
    #[serde(default)]
    variable: Option<String>,
    /// Further fields of each server.
    #[serde(default)]
    extra: Map<String, Value>,
}

/// Form of one server in an [`McpFile`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum McpEntryForm {
    /// `command`, `args`, `env`.
    #[default]
    Command,
    /// `type: "local"`, `command` with its arguments, `environment`.
    Local,
}

impl McpFile {
    /// Entries of servers, by name.
    pub(crate) fn entries(&self, servers: &[McpServer]) -> Map<String, Value> {
        servers.iter().map(|server| (server.name.to_owned(), self.entry(server))).collect()
    }

    fn entry(&self, server: &McpServer) -> Value {
        let reference = |name: &String| Some((name.clone(), json!(self.variable.as_ref()?.replace("{name}", name))));
        let environment: Map<String, Value> =
            server.environment.iter().filter_map(|(name, _)| reference(name)).collect();
        let mut entry = match self.form {
            McpEntryForm::Command => json!({
                "command": server.command.first(),
                "args": server.command.iter().skip(1).collect::<Vec<_>>(),
                "env": environment,
            }),
            McpEntryForm::Local => json!({
                "type": "local",
                "command": server.command,
                "environment": environment,
            }),
        };
        if let Value::Object(fields) = &mut entry {
            fields.extend(self.extra.clone());
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::super::HarnessTable;
    use super::*;

    #[test]
    fn entries_name_variables_and_hold_no_secret() {
        let table = HarnessTable::read(None).expect("a table");
        let server = McpServer {
            name: "relay-node",
            command: ["/bin/x", "mcp"].map(str::to_owned).to_vec(),
            environment: vec![("TOKEN".into(), "secret".into())],
        };
        let entry = |program: &str| {
            let harness = table.find(program).expect("an entry");
            let file = harness.mcp_file.as_ref().expect("a file");
            let entries = file.entries(std::slice::from_ref(&server));
            assert!(!json!(entries).to_string().contains("secret"), "{program}");
            (format!("{}#{}", file.path, file.key), entries["relay-node"].clone())
        };
        let (place, cursor) = entry("cursor-agent");
        assert_eq!(place, ".cursor/mcp.json#mcpServers");
        assert_eq!(cursor, json!({ "command": "/bin/x", "args": ["mcp"], "env": { "TOKEN": "${env:TOKEN}" } }));
        let (place, opencode) = entry("opencode");
        assert_eq!(place, "opencode.json#mcp");
        let expected =
            json!({ "type": "local", "command": ["/bin/x", "mcp"], "environment": { "TOKEN": "{env:TOKEN}" } });
        assert_eq!(opencode, expected);
        assert_eq!(entry("gemini").1["env"], json!({ "TOKEN": "${TOKEN}" }));
        assert_eq!((&entry("droid").1["type"], &entry("grok").1["transport"]), (&json!("stdio"), &json!("stdio")));
    }
}
