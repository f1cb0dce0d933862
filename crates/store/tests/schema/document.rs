//! `docs/schema.md`, generated from the migrated database: tables by noun, columns, keys, and a diagram.
//!
//! `RELAY_WRITE_SCHEMA=1 cargo nextest run -p relay-store --test schema` writes it again.

use std::fmt::Write as _;
use std::path::Path;

use crate::fixture::Database;

/// A noun of the documentation with its tables, each with its purpose.
struct Noun {
    title: &'static str,
    tables: &'static [(&'static str, &'static str)],
}

const NOUNS: [Noun; 16] = [
    Noun {
        title: "Workspaces",
        tables: &[
            ("workspaces", "Tenants. Deleted workspaces stay until they are erased."),
            ("quotas", "Plan of a workspace, and the quotas that an operator set apart from the plan."),
            (
                "rate_budgets",
                "Requests taken from a workspace's rate limit in a minute. Unlogged: a crash forgets them.",
            ),
            ("usage_minutes", "Usage of a workspace per minute. Partitioned by day."),
            ("usage_floors", "Sum of all mailbox floors when usage was last counted."),
        ],
    },
    Noun {
        title: "Access",
        tables: &[
            ("tokens", "Hashes of bearer tokens, and the workspace, agent or node that each one stands for."),
            ("former_agent_tokens", "Agent tokens from before the last rotation, accepted for the workspace's grace."),
            ("idempotency_keys", "Answers stored under an idempotency key for 24 hours."),
            ("secret_keys", "Encryption keys that the engine generated because none was configured."),
        ],
    },
    Noun {
        title: "Agents",
        tables: &[
            ("agents", "Agents with their status, location (node and provider) and profile."),
            ("session_events", "Events that agents' sessions report, numbered per agent."),
            ("session_heads", "Next number of an agent's session events. Its row lock orders their effects."),
            ("agent_releases", "Agents that their nodes were asked to end, until the outcome is known."),
        ],
    },
    Noun {
        title: "Nodes",
        tables: &[
            ("nodes", "Brokers, direct connections, http_push endpoints and poll consumers."),
            ("providers", "Connections that serve a node, fenced by an epoch."),
            ("node_capabilities", "Capabilities that providers advertise, as placement reads them."),
        ],
    },
    Noun {
        title: "Processes",
        tables: &[
            ("gateways", "Leases of gateway processes."),
            ("worker_ids", "Leases of the worker numbers inside snowflake ids."),
            ("loop_state", "Scan positions of worker loops, as JSON."),
        ],
    },
    Noun {
        title: "Channels",
        tables: &[
            ("channels", "Channels, and direct conversations as channels of their own types."),
            ("channel_members", "Members of channels and conversations, their mutes and last-read pointers."),
        ],
    },
    Noun {
        title: "Messages",
        tables: &[
            ("messages", "Messages, written once by the committer. Partitioned by day."),
            ("message_edits", "Earlier texts of edited messages, kept as long as events are."),
            ("message_reactions", "Reactions to messages."),
            ("session_messages", "Messages by the session that their author was bound with."),
            ("message_reads", "Explicit read receipts."),
            ("fanouts", "Messages with many recipients whose deliveries are being written, in chunks."),
            ("outbox", "Committed batches that are still to be published to NATS."),
            ("webhooks", "Inbound webhooks: tokens with which messages are posted from outside."),
        ],
    },
    Noun {
        title: "Mailboxes",
        tables: &[
            ("mailbox_heads", "Next seq of each mailbox. Its row lock serialises sends to one agent."),
            ("mailbox_cursors", "Sent seq, ack floor and settled floor of each mailbox."),
            (
                "mailbox_changes",
                "Change feed: mailboxes that got deliveries, agents and providers that moved. Kept ten minutes.",
            ),
            ("ack_changes", "Change feed: mailboxes that were acked. Kept ten minutes."),
            ("deliveries", "One row per message and recipient, written once. Partitioned by day."),
            ("delivery_exceptions", "Settlements: deliveries whose state departs from the floors."),
            ("delivery_claims", "Deliveries leased to consumers on poll nodes."),
            ("ack_log", "Ack floors over time, one row per agent and second. Partitioned by day."),
            ("mailbox_reads", "Seq up to which acks were folded into last-read pointers."),
            ("skipped_seqs", "Runs of numbers that a recovery skipped in a mailbox."),
            ("redrives", "Redrives by filter and their progress."),
        ],
    },
    Noun {
        title: "Actions",
        tables: &[
            ("actions", "Definitions of actions with their schemas."),
            ("invocations", "Invocations with their placement and outcome."),
            ("triggers", "Messages that invoke actions."),
            ("trigger_progress", "Event number up to which a workspace's log was scanned for triggers."),
        ],
    },
    Noun {
        title: "Push",
        tables: &[
            ("push_workers", "Leases of workers that dispatch to http_push endpoints."),
            ("push_mailboxes", "Mailboxes of agents on http_push nodes, and the worker that serves each."),
            ("push_endpoints", "Circuit breaker state of endpoints."),
            ("delivery_attempts", "Attempts to deliver, with their answers. Partitioned by day."),
        ],
    },
    Noun {
        title: "Subscriptions",
        tables: &[
            ("subscriptions", "Event subscriptions, their cursor and lease."),
            ("subscription_deliveries", "Events queued for a subscription, with attempts."),
            ("subscription_bodies", "Request body of each queued event, for all subscriptions."),
        ],
    },
    Noun {
        title: "Events",
        tables: &[
            ("event_heads", "Next event number of each workspace."),
            ("event_log", "Events of a workspace, one row per transaction. Partitioned by day."),
        ],
    },
    Noun {
        title: "Observers",
        tables: &[
            ("observer_tokens", "Observer tokens with scopes and filters."),
            ("observer_overrides", "Changes to tokens since they were signed, for every gateway."),
            ("signing_keys", "Keys that sign observer tokens."),
        ],
    },
    Noun {
        title: "Files",
        tables: &[
            ("files", "File metadata."),
            ("file_objects", "Objects in file storage, named before their first byte is written."),
            ("file_attachments", "Messages that a file is attached to, as limited observers see files."),
        ],
    },
    Noun {
        title: "Search",
        tables: &[
            ("message_search", "Search index, one row per message. Partitioned by time."),
            ("search_progress", "Message up to which a workspace is indexed."),
            ("message_stats", "Counters per author and day."),
        ],
    },
    Noun {
        title: "Recovery",
        tables: &[("recovery_state", "Identity of the database, to notice that it was restored or promoted.")],
    },
];

/// References between tables: child, column, parent. The schema has no foreign keys, because tables are partitioned
/// and rows of a deleted workspace go in the background.
const REFERENCES: [(&str, &str, &str); 24] = [
    ("agents", "workspace_id", "workspaces"),
    ("agents", "node_id", "nodes"),
    ("providers", "node_id", "nodes"),
    ("node_capabilities", "node_id", "nodes"),
    ("channels", "workspace_id", "workspaces"),
    ("channel_members", "channel_id", "channels"),
    ("channel_members", "agent_id", "agents"),
    ("messages", "channel_id", "channels"),
    ("message_reactions", "message_id", "messages"),
    ("message_reads", "message_id", "messages"),
    ("mailbox_heads", "agent_id", "agents"),
    ("mailbox_cursors", "agent_id", "agents"),
    ("deliveries", "agent_id", "agents"),
    ("deliveries", "source_id", "messages"),
    ("delivery_exceptions", "agent_id", "agents"),
    ("delivery_attempts", "agent_id", "agents"),
    ("push_mailboxes", "agent_id", "agents"),
    ("subscription_deliveries", "subscription_id", "subscriptions"),
    ("invocations", "node_id", "nodes"),
    ("event_log", "workspace_id", "workspaces"),
    ("file_attachments", "file_id", "files"),
    ("file_attachments", "message_id", "messages"),
    ("session_messages", "message_id", "messages"),
    ("fanouts", "message_id", "messages"),
];

const COLUMNS: &str = "
SELECT c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND a.attnum = ANY (i.indkey))
  FROM pg_class c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND c.relname <> '_sqlx_migrations'
   -- Partitions are prepared as ordinary tables before they are attached, named `<table>_p<day>`.
   AND c.relname !~ '_p?[0-9]{6,8}$'
 ORDER BY c.relname, a.attnum";

#[derive(sqlx::FromRow)]
struct Column {
    table: String,
    name: String,
    kind: String,
    not_null: bool,
    in_key: bool,
}

#[tokio::test]
async fn the_schema_document_matches_the_migrated_database() {
    let db = Database::fresh().await;
    let rows: Vec<(String, String, String, bool, bool)> = sqlx::query_as(COLUMNS).fetch_all(&db.pool).await.unwrap();
    let columns: Vec<Column> = rows
        .into_iter()
        .map(|(table, name, kind, not_null, in_key)| Column { table, name, kind, not_null, in_key })
        .collect();
    let listed = |table: &str| NOUNS.iter().any(|noun| noun.tables.iter().any(|(name, _)| *name == table));
    for column in &columns {
        assert!(listed(&column.table), "give table `{}` a noun and a purpose in NOUNS", column.table);
    }

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema.md");
    let generated = document(&columns);
    if std::env::var_os("RELAY_WRITE_SCHEMA").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == generated, "docs/schema.md is out of date: run this test with RELAY_WRITE_SCHEMA=1");
}

fn document(columns: &[Column]) -> String {
    let mut text = String::from(
        "# Schema\n\n\
         Tables of the database by noun, generated from the migrated database by `crates/store/tests/schema/document.rs`.\n\
         Reasons are in [ADR 0001](adr/0001-schema.md); comments on columns are in `migrations/`.\n\
         There are no foreign keys: references are upheld by the transactions that write them.\n\
         Key columns are bold. Columns marked `?` may be null.\n\n\
         ```mermaid\nerDiagram\n",
    );
    for (child, column, parent) in REFERENCES {
        assert!(
            columns.iter().any(|known| known.table == child && known.name == column),
            "{child}.{column} is missing"
        );
        writeln!(text, "    {parent} ||--o{{ {child} : {column}").unwrap();
    }
    text.push_str("```\n");
    for noun in &NOUNS {
        write!(text, "\n## {}\n", noun.title).unwrap();
        for (table, purpose) in noun.tables {
            write!(text, "\n### `{table}`\n\n{purpose}\n\n").unwrap();
            let mut count = 0;
            for column in columns.iter().filter(|column| column.table == *table) {
                count += 1;
                let mark = if column.in_key { "**" } else { "" };
                let null = if column.not_null { "" } else { "?" };
                writeln!(text, "- {mark}{}{mark}: {}{null}", column.name, column.kind).unwrap();
            }
            assert!(count > 0, "table `{table}` is in NOUNS and not in the database");
        }
    }
    text
}
