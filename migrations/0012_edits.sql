-- What messages said before they were edited, and more of what becomes of an invocation.

-- What a message said until an event: its events are read back as they were told. Kept as long as events are.
CREATE TABLE message_edits (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    -- The number of the event that told the edit. Earlier events of the message said what is here.
    until_seq           bigint NOT NULL,
    text                text NOT NULL,
    mentions            text[] NOT NULL,
    blocks              json,
    metadata            json NOT NULL,
    edited_at           timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, message_id, until_seq)
);
CREATE INDEX message_edits_by_age ON message_edits (edited_at);

ALTER TABLE invocations
    -- The only provider of its target node that may do it. Null: any of them.
    ADD COLUMN target_provider  text,
    -- When the provider that has it said that it is at work: silence takes it away no more.
    ADD COLUMN accepted_at      timestamptz;
ALTER TABLE invocations
    ADD CONSTRAINT a_target_provider_is_a_nodes CHECK (target_provider IS NULL OR target_node_id IS NOT NULL) NOT VALID;
-- Who had an agent brought up, for when it ends.
CREATE INDEX invocations_of_agent ON invocations (workspace_id, agent_id, invocation_id) WHERE agent_id IS NOT NULL;
