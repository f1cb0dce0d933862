-- Events get their numbers after the commit (ADR 0018): whoever posts no longer waits for the workspace's counter.

-- What was committed and has no number yet. Rows live for milliseconds.
CREATE TABLE event_inbox (
    workspace_id        bigint NOT NULL,
    -- Rising in the order of cause: what a transaction has seen committed has a smaller one.
    record_id           bigint GENERATED ALWAYS AS IDENTITY,
    created_at          timestamptz NOT NULL,
    -- How many events there are, as in event_log.events.
    event_count         bigint NOT NULL,
    events              json NOT NULL,
    -- The message that its only event edits: message_edits waits for the number.
    edited_message_id   bigint,
    CONSTRAINT record_has_events CHECK (event_count >= 1),
    PRIMARY KEY (workspace_id, record_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_analyze_scale_factor = 0,
        autovacuum_analyze_threshold = 20000);
