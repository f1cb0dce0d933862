-- The event log of each workspace: what observers see, numbered without a gap.

-- The counter of a workspace's events, bumped by the transaction that makes them and locked by it until it
-- commits: a visible seq n means that 1…n-1 are committed. Always the last lock that a transaction takes.
CREATE TABLE event_heads (
    workspace_id        bigint PRIMARY KEY,
    next_seq            bigint NOT NULL DEFAULT 1,
    -- Until then somebody may be looking: events are published live, and those of single deliveries are
    -- recorded at all.
    watched_until       timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT next_event_seq_is_positive CHECK (next_seq >= 1)
) WITH (fillfactor = 40);
INSERT INTO event_heads (workspace_id) SELECT workspace_id FROM workspaces;

-- One record per transaction and workspace, holding the events first_seq … last_seq in order.
CREATE TABLE event_log (
    workspace_id        bigint NOT NULL,
    last_seq            bigint NOT NULL,
    created_on          date NOT NULL,
    first_seq           bigint NOT NULL,
    created_at          timestamptz NOT NULL,
    -- [{t: type, c: channel id, n: channel name, v: conversation id, a: agent id, m: message id | d: data}, …]
    events              json NOT NULL,
    PRIMARY KEY (workspace_id, last_seq, created_on),
    CONSTRAINT record_is_not_empty CHECK (last_seq >= first_seq)
) PARTITION BY RANGE (created_on);

CREATE OR REPLACE FUNCTION relay_ensure_partitions(days_ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    day date;
    child text;
    made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('relay_partitions'));
    FOREACH parent IN ARRAY ARRAY['messages', 'deliveries', 'ack_log', 'event_log'] LOOP
        FOR day IN SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, days_ahead) AS n LOOP
            child := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass(child) IS NULL THEN
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', child, parent);
                EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                               parent, child, day, day + 1);
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
SELECT relay_ensure_partitions(7);
