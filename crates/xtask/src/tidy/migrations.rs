//! Migrations only add: the version before this one goes on working while they run and after them. What takes something
//! away says why that version does without it, in a comment before the statement that begins with `contract:`.

use super::Source;

const FOLDER: &str = "migrations/";
/// The first one makes the schema.
const FIRST: &str = "0001";
const MARK: &str = "-- contract:";

/// From before the rule, looked at one by one: all let through more than before, or put back at once what they drop.
const LOOKED_AT: [(&str, &str); 5] = [
    ("0004", "DROP CONSTRAINT"),
    ("0004", "ADD CONSTRAINT"),
    ("0005", "DROP INDEX"),
    ("0006", "DROP CONSTRAINT"),
    ("0006", "ADD CONSTRAINT"),
];

/// Words that take something away, wherever they stand in a statement.
const CONTRACTIONS: [&str; 10] = [
    "DROP TABLE",
    "DROP COLUMN",
    "DROP INDEX",
    "DROP CONSTRAINT",
    "DROP FUNCTION",
    "RENAME",
    "ALTER COLUMN",
    "SET NOT NULL",
    "TRUNCATE",
    "DELETE FROM",
];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources {
        let Some(name) = source.path.strip_prefix(FOLDER).filter(|name| name.ends_with(".sql")) else { continue };
        let number = name.split('_').next().unwrap_or_default();
        if number == FIRST {
            continue;
        }
        for (line, what) in contractions(&source.text) {
            if !LOOKED_AT.contains(&(number, what)) {
                findings.push(format!(
                    "{}:{line}: {what}: the version before may need it; say why not, in a comment `{MARK} …` before it",
                    source.path
                ));
            }
        }
    }
}

/// Returns the statements that remove something without a stated reason: the line and the word of each.
fn contractions(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for statement in statements(text) {
        let words = statement.sql.split_whitespace().collect::<Vec<_>>().join(" ").to_uppercase();
        if !statement.is_marked {
            found.extend(find_in_statement(&words).into_iter().map(|what| (statement.line, what)));
        }
    }
    found
}

fn find_in_statement(words: &str) -> Vec<&'static str> {
    let mut found: Vec<_> = CONTRACTIONS.into_iter().filter(|what| words.contains(what)).collect();
    let additions = |what: &str| words.split(what).skip(1).map(str::to_owned).collect::<Vec<_>>();
    // A comma ends a clause; those inside a type or a default do no harm here.
    let needs_a_value = |clause: &String| {
        let own = clause.split(", ADD ").next().unwrap_or_default();
        own.contains("NOT NULL") && !own.contains("DEFAULT")
    };
    if additions("ADD COLUMN").iter().any(needs_a_value) {
        found.push("ADD COLUMN NOT NULL without DEFAULT");
    }
    if words.starts_with("ALTER TABLE")
        && additions("ADD CONSTRAINT").iter().any(|clause| !clause.contains("NOT VALID"))
    {
        found.push("ADD CONSTRAINT");
    }
    found
}

struct Statement {
    line: usize,
    sql: String,
    is_marked: bool,
}

/// The statements without comments and without the bodies of functions.
fn statements(text: &str) -> Vec<Statement> {
    let (mut all, mut in_body) = (Vec::new(), false);
    let empty = |line| Statement { line, sql: String::new(), is_marked: false };
    let mut current = empty(1);
    for (index, line) in text.lines().enumerate() {
        let code = match line.split_once("--") {
            Some((code, _)) => {
                current.is_marked |= line.trim_start().starts_with(MARK);
                code
            }
            None => line,
        };
        if current.sql.is_empty() {
            current.line = index + 1;
        }
        for (number, part) in code.split("$$").enumerate() {
            in_body ^= number > 0;
            if in_body {
                continue;
            }
            let mut ends = part.split(';');
            current.sql.push_str(ends.next().unwrap_or_default());
            for next in ends {
                all.push(std::mem::replace(&mut current, empty(index + 1)));
                current.sql.push_str(next.trim_start());
            }
        }
        if !current.sql.trim().is_empty() {
            current.sql.push(' ');
        } else {
            current.sql.clear();
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&'static str> {
        contractions(text).into_iter().map(|(_, what)| what).collect()
    }

    #[test]
    fn a_migration_that_only_adds_passes() {
        for text in [
            "CREATE TABLE a (b bigint NOT NULL, c text NOT NULL);",
            "ALTER TABLE a ADD COLUMN b text;",
            "ALTER TABLE a\n    ADD COLUMN b int NOT NULL DEFAULT 0, -- why\n    ADD COLUMN c text;",
            "ALTER TABLE a ADD CONSTRAINT c CHECK (b > 0) NOT VALID;",
            "-- DROP TABLE a;\nCREATE INDEX a_b ON a (b);",
            "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS $$\nBEGIN\n  DELETE FROM a; DROP TABLE a;\nEND $$;",
        ] {
            assert!(words(text).is_empty(), "{text}: {:?}", words(text));
        }
    }

    #[test]
    fn a_contraction_is_found_with_its_line() {
        for (text, what) in [
            ("drop  table a;", "DROP TABLE"),
            ("ALTER TABLE a DROP COLUMN b;", "DROP COLUMN"),
            ("ALTER TABLE a RENAME b TO c;", "RENAME"),
            ("ALTER TABLE a ALTER COLUMN b TYPE int;", "ALTER COLUMN"),
            ("ALTER TABLE a ADD COLUMN b int NOT NULL;", "ADD COLUMN NOT NULL without DEFAULT"),
            (
                "ALTER TABLE a ADD COLUMN b int NOT NULL, ADD COLUMN c int DEFAULT 0;",
                "ADD COLUMN NOT NULL without DEFAULT",
            ),
            ("ALTER TABLE a ADD CONSTRAINT c CHECK (b > 0);", "ADD CONSTRAINT"),
            ("CREATE FUNCTION f() AS $$ x $$; DROP FUNCTION g;", "DROP FUNCTION"),
        ] {
            assert_eq!(words(text), [what], "{text}");
        }
        assert_eq!(contractions("CREATE TABLE a (b int);\n\n-- why\nDROP INDEX c;"), [(4, "DROP INDEX")]);
    }

    #[test]
    fn a_reason_lets_it_pass_once() {
        let marked = "-- contract: nothing has read it since 0.2\nDROP INDEX a;\n";
        assert!(words(marked).is_empty());
        assert_eq!(words(&format!("{marked}DROP INDEX b;")), ["DROP INDEX"]);
    }
}
