//! What the documents tell operators to type is what this program takes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Command, CommandFactory as _};

const PROGRAM: &str = "relayctl";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn whole() -> Command {
    let mut command = crate::Arguments::command();
    // Spreads the options that all commands take.
    command.build();
    command
}

fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("docs")];
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
    found.extend(["README.md", "deploy/README.md", "helm/relay/README.md"].map(|page| root().join(page)));
    found
}

/// The pieces of a page that are code: lines of blocks, and what stands between backticks.
fn code(text: &str) -> Vec<&str> {
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

/// The words behind the program's name, for each time that a piece of code calls it.
fn calls(piece: &str) -> Vec<Vec<&str>> {
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

/// What of a call the program would not know: a command, or an option of the command.
fn unknown(program: &Command, words: &[&str]) -> Option<String> {
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
fn a_command_that_does_not_exist_is_found_out() {
    let program = whole();
    let check = |call: &str| unknown(&program, &call.split_whitespace().collect::<Vec<_>>());
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
    assert_eq!(calls("x && /usr/bin/relayctl doctor --json > out; relayctl"), [vec!["doctor", "--json"], vec![]]);
}

#[test]
fn every_command_in_the_documents_exists() {
    let program = whole();
    let (mut looked_at, mut wrong) = (0, Vec::new());
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for call in code(&text).into_iter().flat_map(calls) {
            looked_at += 1;
            wrong.extend(unknown(&program, &call).map(|why| format!("{}: {call:?}: {why}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(looked_at > 20, "{looked_at} calls are in the documents");
}

/// The table of commands leaves the program's name out.
#[test]
fn every_command_of_the_programs_own_page_exists() {
    let program = whole();
    let text = fs::read_to_string(root().join("docs/operations/relayctl.md")).unwrap();
    let mut described = Vec::new();
    for row in text.lines().filter(|line| line.starts_with("| `")) {
        let cell = row.split(" | ").next().unwrap_or_default();
        for call in code(cell) {
            let words: Vec<&str> = call.split_whitespace().collect();
            assert_eq!(unknown(&program, &words), None, "{call}");
            described.push(words[0].to_owned());
        }
    }
    for command in program.get_subcommands().map(Command::get_name).filter(|name| *name != "help") {
        let in_text = text.contains(&format!("`relayctl {command} "));
        assert!(in_text || described.iter().any(|name| name == command), "{command} is not described");
    }
}
