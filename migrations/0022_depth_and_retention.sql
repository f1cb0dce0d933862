-- How deep a workspace's mailboxes are and how long its messages are kept, as its plan or an operator says.

ALTER TABLE quotas ADD COLUMN mailbox_depth integer
    CONSTRAINT own_mailbox_depth_is_usable CHECK (mailbox_depth BETWEEN 1 AND 100000);
ALTER TABLE quotas ADD COLUMN message_days integer
    CONSTRAINT own_message_days_are_usable CHECK (message_days BETWEEN 8 AND 36500);

-- What counts, plan or own, lies beside mailbox_depth, where commits and workers read it. Null: as the installation says.
ALTER TABLE workspaces ADD COLUMN message_days integer;
-- Messages of earlier days (UTC) are gone. Moved by the worker, at most once a day.
ALTER TABLE workspaces ADD COLUMN messages_kept_from date NOT NULL DEFAULT '2025-01-01';
CREATE INDEX workspaces_by_oldest_messages ON workspaces ((messages_kept_from + message_days))
    WHERE message_days IS NOT NULL;

-- Depths that were set by hand stay.
INSERT INTO quotas (workspace_id, mailbox_depth)
SELECT workspace_id, least(mailbox_depth, 100000) FROM workspaces WHERE mailbox_depth <> 1000
ON CONFLICT (workspace_id) DO UPDATE SET mailbox_depth = excluded.mailbox_depth;
