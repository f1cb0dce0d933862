-- Change feed of acks (ADR 0052): one record per statement that raised ack floors, written by triggers as in
-- mailbox_changes. The worker folds acks into last-read pointers from it instead of walking all mailboxes.
CREATE TABLE ack_changes (
    xid                 xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at          timestamptz NOT NULL DEFAULT relay_now(),
    -- Of equal length.
    workspaces          bigint[] NOT NULL,
    agents              bigint[] NOT NULL
);
CREATE INDEX ack_changes_by_xid ON ack_changes (xid);

CREATE FUNCTION relay_record_acks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ack_changes (workspaces, agents)
    SELECT array_agg(workspace_id), array_agg(agent_id) FROM acked HAVING count(*) > 0;
    RETURN NULL;
END $$;
-- Several acks within a second update one row, and each may follow a read of the record of the last.
CREATE TRIGGER record_inserted_acks AFTER INSERT ON ack_log
    REFERENCING NEW TABLE AS acked FOR EACH STATEMENT EXECUTE FUNCTION relay_record_acks();
CREATE TRIGGER record_updated_acks AFTER UPDATE ON ack_log
    REFERENCING NEW TABLE AS acked FOR EACH STATEMENT EXECUTE FUNCTION relay_record_acks();
