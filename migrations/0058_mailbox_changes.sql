-- Change feed of mailboxes and their locations (ADR 0052): one record per statement that moved heads, one per agent that
-- came to another node or provider, one per provider of a broker that came or left. Triggers write them, so that no
-- writer can forget one. Gateways read what committed since their last read instead of comparing all mailboxes; records
-- are pruned after ten minutes.
CREATE TABLE mailbox_changes (
    -- Transaction of the record. The position of a reader is the snapshot of its last read.
    xid                 xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at          timestamptz NOT NULL DEFAULT relay_now(),
    -- Of equal length, but for the record of a provider, which has no agent.
    workspaces          bigint[] NOT NULL,
    agents              bigint[] NOT NULL,
    -- New heads. Empty if the record is about a location.
    next_seqs           bigint[] NOT NULL DEFAULT '{}',
    -- New location of the agent; or the node and provider that came or left.
    node_id             text,
    provider            text
);
-- No key: records are found by transaction, and never changed.
CREATE INDEX mailbox_changes_by_xid ON mailbox_changes (xid);

CREATE FUNCTION relay_record_moved_heads() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO mailbox_changes (workspaces, agents, next_seqs)
    SELECT array_agg(workspace_id), array_agg(agent_id), array_agg(next_seq) FROM moved HAVING count(*) > 0;
    RETURN NULL;
END $$;
CREATE TRIGGER record_moved_heads AFTER UPDATE ON mailbox_heads
    REFERENCING NEW TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION relay_record_moved_heads();

CREATE FUNCTION relay_record_moved_agent() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO mailbox_changes (workspaces, agents, node_id, provider)
    VALUES (ARRAY[NEW.workspace_id], ARRAY[NEW.agent_id], NEW.node_id, NEW.provider);
    RETURN NULL;
END $$;
-- Statements that do not name these columns, such as those of last_seen_at, do not reach the trigger.
CREATE TRIGGER record_moved_agent AFTER UPDATE OF node_id, provider ON agents FOR EACH ROW
    WHEN ((OLD.node_id, OLD.provider) IS DISTINCT FROM (NEW.node_id, NEW.provider))
    EXECUTE FUNCTION relay_record_moved_agent();
-- No connection of a direct node can be older than its agent.
CREATE TRIGGER record_new_agent AFTER INSERT ON agents FOR EACH ROW
    WHEN (NOT starts_with(NEW.node_id, 'node_direct_'))
    EXECUTE FUNCTION relay_record_moved_agent();

CREATE FUNCTION relay_record_provider() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO mailbox_changes (workspaces, agents, node_id, provider)
    VALUES (ARRAY[NEW.workspace_id], '{}', NEW.node_id, NEW.provider);
    RETURN NULL;
END $$;
-- A direct node has one provider, so nothing falls to another one.
CREATE TRIGGER record_new_provider AFTER INSERT ON providers FOR EACH ROW
    WHEN (NOT starts_with(NEW.node_id, 'node_direct_'))
    EXECUTE FUNCTION relay_record_provider();
CREATE TRIGGER record_changed_provider AFTER UPDATE OF gateway_id, epoch ON providers FOR EACH ROW
    WHEN ((OLD.gateway_id, OLD.epoch) IS DISTINCT FROM (NEW.gateway_id, NEW.epoch)
          AND NOT starts_with(NEW.node_id, 'node_direct_'))
    EXECUTE FUNCTION relay_record_provider();
