//! Arguments that a harness gets in front of its own: model, session, MCP servers.

use serde_json::{Map, json};

use super::{Harness, McpServer, McpStyle};

impl Harness {
    /// Arguments for a model, unless the caller has given some.
    pub(crate) fn model_arguments(&self, model: Option<&str>, given: &[String]) -> Vec<String> {
        match model {
            Some(model) if !has_flag(given, &self.model_args) => fill(&self.model_args, "{model}", model),
            Some(_) | None => Vec::new(),
        }
    }

    /// Arguments that begin or resume a session, unless the caller has given some.
    pub(crate) fn session_arguments(&self, session: Option<&str>, resumes: bool, given: &[String]) -> Vec<String> {
        let template = if resumes { &self.session_resume_args } else { &self.session_new_args };
        let is_given = has_flag(given, &self.session_new_args) || has_flag(given, &self.session_resume_args);
        match session {
            Some(session) if !is_given => fill(template, "{session}", session),
            Some(_) | None => Vec::new(),
        }
    }

    /// Arguments that name MCP servers, unless the caller has configured some.
    pub(crate) fn mcp_arguments(&self, servers: &[McpServer], given: &[String]) -> Vec<String> {
        match self.mcp {
            // Servers of the driver win, also in the form with `=`.
            Some(McpStyle::Claude) if !given.iter().any(|arg| arg.starts_with("--mcp-config")) => {
                let mut entries = Map::new();
                for server in servers {
                    let environment: Map<_, _> =
                        server.environment.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
                    let entry = json!({
                        "command": server.command.first(),
                        "args": server.command.iter().skip(1).collect::<Vec<_>>(),
                        "env": environment,
                    });
                    entries.insert(server.name.to_owned(), entry);
                }
                vec!["--mcp-config".to_owned(), json!({ "mcpServers": entries }).to_string()]
            }
            Some(McpStyle::Codex) => servers.iter().flat_map(codex_arguments).collect(),
            Some(McpStyle::Claude) | None => Vec::new(),
        }
    }
}

fn codex_arguments(server: &McpServer) -> Vec<String> {
    // JSON strings and arrays of them are TOML as well, as long as no control character is in them.
    let key = format!("mcp_servers.{}", server.name);
    let mut values = vec![
        format!("{key}.command={}", json!(server.command.first())),
        format!("{key}.args={}", json!(server.command.iter().skip(1).collect::<Vec<_>>())),
    ];
    values.extend(server.environment.iter().map(|(name, value)| format!("{key}.env.{name}={}", json!(value))));
    values.into_iter().flat_map(|value| ["--config".to_owned(), value]).collect()
}

fn has_flag(given: &[String], template: &[String]) -> bool {
    let Some(flag) = template.first() else { return false };
    given.iter().any(|arg| arg == flag || arg.strip_prefix(flag.as_str()).is_some_and(|rest| rest.starts_with('=')))
}

fn fill(template: &[String], place: &str, value: &str) -> Vec<String> {
    template.iter().map(|arg| arg.replace(place, value)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::HarnessTable;
    use super::*;

    fn texts(args: &[&str]) -> Vec<String> {
        args.iter().map(|arg| (*arg).to_owned()).collect()
    }

    #[test]
    fn arguments_of_the_caller_win() {
        let table = HarnessTable::read(None).expect("a table");
        let claude = table.find("claude").expect("an entry");
        assert_eq!(claude.model_arguments(Some("opus"), &[]), ["--model", "opus"]);
        assert!(claude.model_arguments(Some("opus"), &texts(&["--model=haiku"])).is_empty());
        assert_eq!(claude.session_arguments(Some("s"), true, &[]), ["--resume", "s"]);
        assert!(claude.session_arguments(Some("s"), false, &texts(&["--resume", "t"])).is_empty());
        assert!(claude.mcp_arguments(&[], &texts(&["--mcp-config", "x"])).is_empty());
    }

    #[test]
    fn servers_are_named_in_the_way_of_each_program() {
        let table = HarnessTable::read(None).expect("a table");
        let server = McpServer {
            name: "relay-node",
            command: texts(&["/bin/x", "mcp"]),
            environment: vec![("A".into(), "b\"c".into())],
        };
        let claude = table.find("claude").expect("an entry").mcp_arguments(std::slice::from_ref(&server), &[]);
        assert_eq!(
            claude[1],
            r#"{"mcpServers":{"relay-node":{"command":"/bin/x","args":["mcp"],"env":{"A":"b\"c"}}}}"#
        );
        let codex = table.find("codex").expect("an entry").mcp_arguments(&[server], &[]);
        let values: Vec<_> = codex.iter().filter(|arg| *arg != "--config").collect();
        assert_eq!(
            values,
            [
                r#"mcp_servers.relay-node.command="/bin/x""#,
                r#"mcp_servers.relay-node.args=["mcp"]"#,
                r#"mcp_servers.relay-node.env.A="b\"c""#
            ]
        );
    }
}
