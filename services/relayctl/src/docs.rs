//! Test: every `relayctl` command in the documentation exists.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Command, CommandFactory as _};

const PROGRAM: &str = "relayctl";

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn full_command() -> Command {
    let mut command = crate::Arguments::command();
    // Adds the global options to all commands.
    command.build();
    command
}

fn doc_pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![repository_root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.extend(["README.md", "deploy/README.md", "helm/relay/README.md"].map(|page| repository_root().join(page)));
    found
}

/// Returns the code of a page: lines of blocks, and text between backticks.
fn code_pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            pieces.push(line);
        } else {
            pieces.extend(line.split('`').skip(1).step_by(2));
        }
    }
    pieces
}

/// Returns the arguments of each call of the program in a piece of code.
fn find_calls(piece: &str) -> Vec<Vec<&str>> {
    let words: Vec<&str> = piece.split_whitespace().collect();
    let begins = words.iter().enumerate().filter(|(_, word)| word.rsplit('/').next() == Some(PROGRAM));
    begins
        .map(|(at, _)| {
            let rest = words[at + 1..].iter().copied();
            rest.take_while(|word| !["|", ";", "&&", "&", "\\"].contains(word) && !word.starts_with(['#', '>']))
                .collect()
        })
        .collect()
}

/// Returns the first command or option of a call that the program does not have.
fn find_unknown(program: &Command, words: &[&str]) -> Option<String> {
    let mut command = program;
    let mut is_value = false;
    for word in words.iter().map(|word| word.trim_matches(['[', ']', ',', ';'])) {
        if is_value || word.is_empty() || word == "…" {
            is_value = false;
        } else if let Some(option) = word.strip_prefix('-') {
            let (name, has_value) = option.split_once('=').map_or((option, false), |(name, _)| (name, true));
            let known = command.get_arguments().find(|argument| match name.strip_prefix('-') {
                Some(long) => argument.get_long() == Some(long),
                None => argument.get_short().is_some_and(|short| name == short.to_string()),
            });
            match known {
                Some(argument) => is_value = !has_value && argument.get_action().takes_values(),
                None => return Some(format!("{} has no {word}", command.get_name())),
            }
        } else if command.has_subcommands() {
            match command.find_subcommand(word) {
                Some(found) => command = found,
                None => return Some(format!("{} has no command {word}", command.get_name())),
            }
        } else if command.get_positionals().next().is_none() {
            return Some(format!("{} takes no {word}", command.get_name()));
        }
    }
    None
}

#[test]
fn an_unknown_command_is_detected() {
    let program = full_command();
    let check = |call: &str| find_unknown(&program, &call.split_whitespace().collect::<Vec<_>>());
    for right in [
        "migrate [--wait-seconds 30]",
        "--json restore --dry-run",
        "dead-letter redrive --workspace W --reason=rejected --dry-run",
        "dead-letter list -w W",
        "workspace export W",
        "config",
    ] {
        assert_eq!(check(right), None, "{right}");
    }
    for wrong in ["status", "dead-letter redo", "migrate --quickly", "doctor now", "migrate -w W"] {
        assert!(check(wrong).is_some(), "{wrong}");
    }
    assert_eq!(find_calls("x && /usr/bin/relayctl doctor --json > out; relayctl"), [vec!["doctor", "--json"], vec![]]);
}

#[test]
fn every_documented_command_exists() {
    let program = full_command();
    let (mut looked_at, mut wrong) = (0, Vec::new());
    for page in doc_pages() {
        let text = fs::read_to_string(&page).unwrap();
        for call in code_pieces(&text).into_iter().flat_map(find_calls) {
            looked_at += 1;
            wrong.extend(find_unknown(&program, &call).map(|why| format!("{}: {call:?}: {why}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(looked_at > 20, "{looked_at} calls are in the documents");
}

/// The table of commands omits the program's name.
#[test]
fn every_command_is_documented_on_its_page() {
    let program = full_command();
    let text = fs::read_to_string(repository_root().join("docs/operations/relayctl.md")).unwrap();
    let mut described = Vec::new();
    for row in text.lines().filter(|line| line.starts_with("| `")) {
        let cell = row.split(" | ").next().unwrap_or_default();
        for call in code_pieces(cell) {
            let words: Vec<&str> = call.split_whitespace().collect();
            assert_eq!(find_unknown(&program, &words), None, "{call}");
            described.push(words[0].to_owned());
        }
    }
    for command in program.get_subcommands().map(Command::get_name).filter(|name| *name != "help") {
        let in_text = text.contains(&format!("`relayctl {command} "));
        assert!(in_text || described.iter().any(|name| name == command), "{command} is not described");
    }
}
