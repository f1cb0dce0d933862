-- How long a workspace accepts the token that an agent had before its last rotation. 0: it ends at once.
ALTER TABLE workspaces ADD COLUMN agent_token_grace_seconds integer NOT NULL DEFAULT 0
    CONSTRAINT agent_token_grace_is_bounded CHECK (agent_token_grace_seconds BETWEEN 0 AND 86400);

-- Tokens from before the last rotation, at most one for each agent. A table of its own: processes of the version before
-- know nothing of it, and so refuse these tokens.
CREATE TABLE former_agent_tokens (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    token_hash          bytea NOT NULL,
    replaced_at         timestamptz NOT NULL,
    -- The workspace's setting at the rotation. A lower one shortens it, a higher one does not prolong it.
    valid_until         timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, agent_id)
);
CREATE UNIQUE INDEX former_agent_tokens_by_hash ON former_agent_tokens (token_hash);
