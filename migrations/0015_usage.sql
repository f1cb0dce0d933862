-- What each workspace used, by the minute: counted by the workers behind what happens, never in its way.

CREATE TABLE usage_minutes (
    workspace_id        bigint NOT NULL,
    -- When the minute began.
    minute              timestamptz NOT NULL,
    created_on          date NOT NULL,
    -- Counted from rows, and again while rows of the minute may still become visible.
    messages            bigint NOT NULL DEFAULT 0,
    deliveries          bigint NOT NULL DEFAULT 0,
    dead_letters        bigint NOT NULL DEFAULT 0,
    invocations         bigint NOT NULL DEFAULT 0,
    push_attempts       bigint NOT NULL DEFAULT 0,
    -- By how much the floors of the workspace's mailboxes rose.
    acked               bigint NOT NULL DEFAULT 0,
    settled             bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (workspace_id, minute, created_on)
) PARTITION BY RANGE (created_on);

-- Where the floors of a workspace's mailboxes stood, in all, when they were last added up.
CREATE TABLE usage_floors (
    workspace_id        bigint PRIMARY KEY,
    acked               bigint NOT NULL,
    settled             bigint NOT NULL
) WITH (fillfactor = 60);

-- The tries of a workspace in a minute.
CREATE INDEX delivery_attempts_by_age ON delivery_attempts (workspace_id, attempted_at);

SELECT relay_ensure_partitions(7);
