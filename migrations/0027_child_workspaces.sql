-- Workspaces that were created with a workspace key count against a quota of the workspace that answers for them: the
-- one of that key, or the one that answers for it. Null: created by an operator or an anonymous client.
ALTER TABLE workspaces ADD COLUMN created_by bigint;
CREATE INDEX workspaces_by_creator ON workspaces (created_by) WHERE created_by IS NOT NULL;

ALTER TABLE quotas ADD COLUMN child_workspaces integer
    CONSTRAINT own_child_workspaces_are_not_negative CHECK (child_workspaces >= 0);
