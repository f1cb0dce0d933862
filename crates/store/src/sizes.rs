//! Sizes of stored contents, as SQL expressions that do not read what Postgres stores apart from the row.

/// Upper bound of the size of a `json` column. The length of a compressed one is not stored: compression saves at most
/// a factor of 88 (pglz) or 255 (lz4), and no message, outcome or record is much larger than a megabyte.
/// A null has no size, which the inner `coalesce` says: `least` passes nulls over.
macro_rules! json_bytes {
    ($column:literal) => {
        concat!(
            "least(1048576, coalesce(pg_column_size(",
            $column,
            ") * CASE pg_column_compression(",
            $column,
            ") WHEN 'pglz' THEN 88 WHEN 'lz4' THEN 255 ELSE 1 END, 0))"
        )
    };
}

/// Text, blocks, metadata and attachments of the message `m`. The length of a text is stored.
pub(crate) const MESSAGE_BYTES: &str = concat!(
    "(octet_length(m.text) + ",
    json_bytes!("m.blocks"),
    " + ",
    json_bytes!("m.metadata"),
    " + ",
    json_bytes!("m.attachments"),
    ")"
);

/// Content `v` that an edit replaced.
pub(crate) const EDIT_BYTES: &str =
    concat!("(octet_length(v.text) + ", json_bytes!("v.blocks"), " + ", json_bytes!("v.metadata"), ")");

/// Input of the invocation `i`.
pub(crate) const INPUT_BYTES: &str = json_bytes!("i.input");

/// Output and error of the invocation `i`.
pub(crate) const OUTCOME_BYTES: &str = concat!("(", json_bytes!("i.output"), " + coalesce(octet_length(i.error), 0))");

/// Texts and JSON of the agent `a`.
pub(crate) const AGENT_BYTES: &str = concat!(
    "(coalesce(octet_length(a.persona), 0) + ",
    json_bytes!("a.metadata"),
    " + ",
    json_bytes!("a.capabilities"),
    ")"
);

/// JSON and tags of the node `n`. As text `jsonb` takes up to twice its bytes.
pub(crate) const NODE_BYTES: &str = concat!(
    "(2 * ",
    json_bytes!("n.capabilities"),
    " + 2 * ",
    json_bytes!("n.delivery"),
    " + coalesce(pg_column_size(n.tags), 0))"
);

/// Contents of the providers of the node `n`.
pub(crate) const PROVIDERS_BYTES: &str = concat!(
    "coalesce((SELECT sum(2 * ",
    json_bytes!("p.capabilities"),
    " + coalesce(pg_column_size(p.tags), 0) + coalesce(octet_length(p.version), 0) + 512)
       FROM providers p WHERE p.workspace_id = n.workspace_id AND p.node_id = n.node_id), 0)::bigint"
);

/// Topic and JSON of the channel `c`.
pub(crate) const CHANNEL_BYTES: &str =
    concat!("(coalesce(octet_length(c.topic), 0) + ", json_bytes!("c.metadata"), ")");

/// Schemas of the action `c`.
pub(crate) const ACTION_BYTES: &str =
    concat!("(", json_bytes!("c.input_schema"), " + ", json_bytes!("c.output_schema"), ")");

/// Events of a record.
pub(crate) const RECORD_BYTES: &str = json_bytes!("events");
