-- Rights inside a workspace: settings by name, of the whole workspace and of single agents. Null: the defaults.
ALTER TABLE workspaces ADD COLUMN policy jsonb;
ALTER TABLE agents ADD COLUMN rights jsonb;
-- Agent whose invocation started this one. Written once.
ALTER TABLE agents ADD COLUMN spawned_by bigint;

-- Creating agent; null for the workspace key, and for rows of earlier versions.
ALTER TABLE subscriptions ADD COLUMN created_by bigint;
ALTER TABLE triggers ADD COLUMN created_by bigint;

-- Conversation of the event: its reader may have left it by the time of the call.
ALTER TABLE subscription_deliveries ADD COLUMN conversation_id text;

-- Messages that a file is attached to, for observers that see a part of the workspace only. Messages of earlier
-- versions are not listed: their files are shown to observers without such filters.
CREATE TABLE file_attachments (
    workspace_id        bigint NOT NULL,
    file_id             bigint NOT NULL,
    message_id          bigint NOT NULL,
    created_on          date NOT NULL,
    PRIMARY KEY (workspace_id, file_id, message_id)
);
