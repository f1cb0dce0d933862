-- What the worker loops need beyond the spine.

-- The outbox relay claims a batch before it publishes it, without holding a transaction open while
-- NATS answers: nobody else relays the batch until then. A claim that lapses is taken again.
ALTER TABLE outbox ADD COLUMN claimed_until timestamptz;

-- As before, but the new day is attached instead of created in place: attaching takes a lock that
-- readers and writers of the other days do not feel.
CREATE OR REPLACE FUNCTION relay_ensure_partitions(days_ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    day date;
    child text;
    made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('relay_partitions'));
    FOREACH parent IN ARRAY ARRAY['messages', 'deliveries', 'ack_log'] LOOP
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
