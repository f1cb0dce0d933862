-- Recovery, suspension and draining.

-- Noticing that this database is not the one that the engine knew: it was restored, or a standby was promoted.

-- One row. It has no tenant.
CREATE TABLE recovery_state (
    only_row            boolean PRIMARY KEY DEFAULT true,
    -- What relay_database_identity() said when the engine last agreed with it; null before the first start.
    identity            text,
    -- When a process last saw that identity. Restored with the rest, it tells how old the restored state is.
    seen_at             timestamptz NOT NULL DEFAULT now(),
    -- When a restored state was last brought into line with what had been sent, and what came of it.
    recovered_at        timestamptz,
    report              jsonb,
    CONSTRAINT there_is_one_row CHECK (only_row)
) WITH (fillfactor = 20);
INSERT INTO recovery_state DEFAULT VALUES;

-- Another cluster, another timeline (PITR, promotion), another database (dump, template) or another table (a dump
-- into the same database) give another text. What a managed service does not tell is left out.
CREATE FUNCTION relay_database_identity() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    cluster text := '-';
    timeline text := '-';
BEGIN
    BEGIN
        SELECT system_identifier::text INTO cluster FROM pg_control_system();
    EXCEPTION WHEN OTHERS THEN
        cluster := '-';
    END;
    BEGIN
        timeline := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    EXCEPTION WHEN OTHERS THEN
        timeline := '-';
    END;
    RETURN concat_ws('/', cluster, timeline,
                     (SELECT oid::text FROM pg_database WHERE datname = current_database()),
                     'recovery_state'::regclass::oid::text);
END $$;

-- Nobody is let in while it is set; nothing is removed.
ALTER TABLE workspaces ADD COLUMN suspended_at timestamptz;
CREATE INDEX workspaces_suspended ON workspaces (workspace_id) WHERE suspended_at IS NOT NULL;

-- From the first instant on nothing new is placed there, from the second on it has no socket.
ALTER TABLE nodes ADD COLUMN draining_at timestamptz;
ALTER TABLE nodes ADD COLUMN drained_at timestamptz;
ALTER TABLE nodes ADD CONSTRAINT drained_iff_draining CHECK ((draining_at IS NULL) = (drained_at IS NULL)) NOT VALID;
CREATE INDEX nodes_draining ON nodes (workspace_id, node_id) WHERE draining_at IS NOT NULL;
