//! [`HarnessTable`]: entries by name, and the one for a command.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use regex::Regex;
use relay_verification::strategy::Strategy;
use serde::{Deserialize, Deserializer};

use super::McpFile;
use crate::injection::ends_in_prompt;

const BUILTIN: &str = include_str!("builtin.toml");
/// Pause between text and Enter of programs that are not in canonical mode.
const ENTER_GAP_MS: u64 = 50;
/// A run of a headless agent's program is ended after this time.
pub(crate) const RUN_TIMEOUT: Duration = Duration::from_secs(30 * 60);
const MAX_RUN: Duration = Duration::from_secs(24 * 60 * 60);

/// Entries of all known programs.
#[derive(Debug, Clone, Default)]
pub(crate) struct HarnessTable {
    entries: BTreeMap<String, Arc<Harness>>,
}

/// Knowledge about one program.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Harness {
    /// Name of the entry; filled in from its table.
    #[serde(skip)]
    pub(crate) name: String,
    /// Base names of commands that this entry is for.
    #[serde(default, rename = "match")]
    commands: Vec<String>,
    /// Arguments for a model; `{model}` stands for it.
    #[serde(default)]
    pub(crate) model_args: Vec<String>,
    /// Arguments for a new session with an id of our choice; `{session}` stands for it.
    #[serde(default)]
    pub(crate) session_new_args: Vec<String>,
    /// Arguments to resume a session.
    #[serde(default)]
    pub(crate) session_resume_args: Vec<String>,
    /// Arguments of a run that takes one message as its last argument and ends. Without them there is no such run.
    #[serde(default)]
    pub(crate) headless_args: Vec<String>,
    /// Maximum time of such a run, in seconds.
    #[serde(default = "run_timeout")]
    run_timeout_s: u64,
    /// Arguments by which MCP servers are given to the program: `claude` or `codex`.
    #[serde(default)]
    pub(crate) mcp: Option<McpStyle>,
    /// File in the project from which the program reads its MCP servers.
    #[serde(default)]
    pub(crate) mcp_file: Option<McpFile>,
    /// Prefix of our tools' names in reminders.
    #[serde(default)]
    pub(crate) tool_prefix: String,
    /// Signs that the program takes input.
    #[serde(default)]
    pub(crate) ready: Option<ReadyRule>,
    /// Texts in the output that show work.
    #[serde(default)]
    pub(crate) activity: Vec<String>,
    /// Ends of the cursor's row while the program rests.
    #[serde(default)]
    prompt: Vec<String>,
    /// Text on the screen in place of a folded paste.
    #[serde(default, deserialize_with = "pattern")]
    pub(crate) fold_pattern: Option<Regex>,
    /// A suggestion in the input line, which a message must not be glued to.
    #[serde(default, deserialize_with = "pattern")]
    pub(crate) ghost_text: Option<Regex>,
    /// Questions of a first start. Messages wait while one is on the screen.
    #[serde(default)]
    gates: Vec<Gate>,
    /// An Enter without any output behind it is repeated once.
    #[serde(default)]
    pub(crate) auto_enter: bool,
    /// `false`: text is typed key by key even where the program would take a paste.
    #[serde(default = "yes")]
    pub(crate) paste: bool,
    /// Pause between text and Enter, in milliseconds.
    #[serde(default = "enter_gap")]
    pub(crate) enter_gap_ms: u64,
    /// Arguments that switch permission questions off; added only where a spawn or the operator asks.
    #[serde(default)]
    pub(crate) permission_bypass_args: Vec<String>,
    /// Verification strategy; that of the entry's name when absent.
    #[serde(default)]
    verification: Option<Strategy>,
}

/// Question of a program, and the keys that answer it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gate {
    /// Name by which the operator allows an answer, such as `folder-trust`.
    pub(crate) name: String,
    /// One of these texts is on the screen.
    pub(crate) screen: Vec<String>,
    /// Answer. Without one the question is only reported.
    #[serde(default)]
    pub(crate) keys: Option<String>,
}

/// Way in which a program is configured with MCP servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum McpStyle {
    /// `--mcp-config <json>`.
    Claude,
    /// `--config mcp_servers.…`.
    Codex,
}

/// Signs that a program takes input. All that are given have to hold.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ReadyRule {
    /// One of these texts is on the screen.
    pub(crate) screen: Vec<String>,
    /// The cursor's row ends in one of these and has no input.
    pub(crate) prompt: Vec<String>,
    /// None of these is on the screen, in any case.
    pub(crate) blocked_by: Vec<String>,
}

impl ReadyRule {
    /// Returns whether the rule holds for the screen and the cursor's row up to the cursor.
    pub(crate) fn holds(&self, screen: &str, before_cursor: &str) -> bool {
        let lower = screen.to_lowercase();
        (self.screen.is_empty() || self.screen.iter().any(|text| screen.contains(text)))
            && (self.prompt.is_empty() || rests_at(&self.prompt, before_cursor))
            && !self.blocked_by.iter().any(|text| lower.contains(&text.to_lowercase()))
    }
}

impl HarnessTable {
    /// The built-in entries, replaced and extended by those of a file.
    ///
    /// # Errors
    /// If the file cannot be read or is not a table of entries.
    pub(crate) fn read(file: Option<&Path>) -> Result<Self> {
        let mut table = Self::default();
        table.extend(BUILTIN).context("read the built-in harness table")?;
        if let Some(file) = file {
            let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            table.extend(&text).with_context(|| format!("read {}", file.display()))?;
        }
        Ok(table)
    }

    fn extend(&mut self, text: &str) -> Result<()> {
        let entries: BTreeMap<String, Harness> = toml::from_str(text)?;
        for (name, mut entry) in entries {
            entry.name.clone_from(&name);
            // Whole entries are replaced: an operator's entry inherits nothing of the built-in one.
            self.entries.insert(name, Arc::new(entry));
        }
        Ok(())
    }

    /// The entry for a command, by the base name of its program.
    pub(crate) fn find(&self, program: &str) -> Option<Arc<Harness>> {
        let base = Path::new(program).file_name()?.to_str()?;
        self.entries.values().find(|entry| entry.commands.iter().any(|command| command == base)).cloned()
    }
}

impl Harness {
    /// Maximum time of a run for one message.
    pub(crate) fn run_timeout(&self) -> Duration {
        Duration::from_secs(self.run_timeout_s).min(MAX_RUN)
    }

    /// Verification strategy of the program.
    pub(crate) fn strategy(&self) -> Strategy {
        self.verification.unwrap_or_else(|| Strategy::builtin(&self.name))
    }

    /// Returns whether the program asks questions at its first start.
    pub(crate) fn has_gates(&self) -> bool {
        !self.gates.is_empty()
    }

    /// The question that is on the screen.
    pub(crate) fn gate_on(&self, screen: &str) -> Option<&Gate> {
        self.gates.iter().find(|gate| gate.screen.iter().any(|text| screen.contains(text)))
    }

    /// Returns whether the cursor's row shows that the program rests.
    pub(crate) fn is_at_prompt(&self, before_cursor: &str) -> bool {
        if self.prompt.is_empty() {
            return ends_in_prompt(before_cursor);
        }
        rests_at(&self.prompt, before_cursor)
    }
}

/// Returns whether the cursor's row is a prompt without input. One word may stand before it, such as a mode or a host,
/// and the frame of an input box; more is input that ends like a prompt.
fn rests_at(prompts: &[String], before_cursor: &str) -> bool {
    let is_frame = |word: &str| word.chars().all(|character| matches!(character, '\u{2500}'..='\u{257f}' | '|'));
    let is_bare = |before: &str| before.split_whitespace().filter(|word| !is_frame(word)).count() <= 1;
    let row = before_cursor.trim_end();
    prompts.iter().any(|prompt| row.strip_suffix(prompt.as_str()).is_some_and(is_bare))
}

fn pattern<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Regex>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| Regex::new(&text)).transpose().map_err(serde::de::Error::custom)
}

fn yes() -> bool {
    true
}

fn enter_gap() -> u64 {
    ENTER_GAP_MS
}

fn run_timeout() -> u64 {
    RUN_TIMEOUT.as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_table_is_valid_and_found_by_base_name() {
        let table = HarnessTable::read(None).expect("a table");
        let claude = table.find("/opt/bin/claude").expect("an entry");
        assert_eq!((claude.name.as_str(), claude.mcp), ("claude", Some(McpStyle::Claude)));
        assert!(claude.is_at_prompt("❯ ") && !claude.is_at_prompt("working"));
        assert!(claude.is_at_prompt("│ > ") && claude.is_at_prompt("plan> "));
        assert!(!claude.is_at_prompt("│ > see <b>") && !claude.is_at_prompt("❯ a >"), "input is no prompt");
        assert!(table.find("cat").is_none());
    }

    #[test]
    fn an_operator_replaces_and_adds_entries() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("harnesses.toml");
        std::fs::write(&file, "[claude]\nmatch = [\"claude\"]\n[mine]\nmatch = [\"mine\"]\nenter_gap_ms = 5\n")
            .expect("a file");
        let table = HarnessTable::read(Some(&file)).expect("a table");
        assert!(table.find("claude").is_some_and(|entry| entry.mcp.is_none()));
        assert!(table.find("mine").is_some_and(|entry| entry.enter_gap_ms == 5));
        std::fs::write(&file, "[mine]\nunknown = 1\n").expect("a file");
        assert!(HarnessTable::read(Some(&file)).is_err());
    }
}
