-- Messages by the session that their author was bound with when they were committed. Processes of the version before
-- write no rows.
CREATE TABLE session_messages (
    workspace_id        bigint NOT NULL,
    session_ref         text NOT NULL,
    message_id          bigint NOT NULL,
    -- Day of the message, which is part of its key.
    created_on          date NOT NULL,
    PRIMARY KEY (workspace_id, session_ref, message_id)
);
-- For the retention of messages, which removes these rows with them.
CREATE INDEX session_messages_by_message ON session_messages (message_id);
