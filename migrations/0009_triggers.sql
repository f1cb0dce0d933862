-- Triggers: messages that invoke actions.

CREATE TABLE triggers (
    workspace_id        bigint NOT NULL,
    trigger_id          bigint NOT NULL,
    -- As given, `#` and `@` included. Null: whatever channel, text or mention.
    channel             text,
    pattern             text,
    mention             text,
    action_name         text NOT NULL,
    enabled             boolean NOT NULL,
    -- Only messages whose event has a larger number: those from before it was made or switched on are not its own.
    after_seq           bigint NOT NULL,
    last_triggered_at   timestamptz,
    -- Why the newest message that it matched invoked nothing.
    last_error          text,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz,
    PRIMARY KEY (workspace_id, trigger_id)
);
CREATE INDEX triggers_enabled ON triggers (workspace_id) WHERE enabled;

-- How far the event log was looked through. There is a row exactly for the workspaces with an enabled trigger.
CREATE TABLE trigger_progress (
    workspace_id        bigint PRIMARY KEY,
    reached_seq         bigint NOT NULL,
    -- Until then a worker is at it.
    claimed_until       timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

-- Sessions of agents that nodes run.

-- Where its session was last run: who asks for that session again asks there.
ALTER TABLE agents ADD COLUMN session_node_id text;
-- Its session is gone for good, and its mail is not yet.
ALTER TABLE agents ADD COLUMN mailbox_orphaned boolean NOT NULL DEFAULT false;
CREATE INDEX agents_by_session ON agents (workspace_id, session_ref) WHERE session_ref IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX agents_orphaned ON agents (workspace_id, agent_id) WHERE mailbox_orphaned;
-- Which invocation brought an agent up.
CREATE INDEX invocations_by_agent ON invocations (workspace_id, agent_id, invocation_id) WHERE agent_id IS NOT NULL;

-- Agents that their nodes were asked to end, until the outcome is known and done.
CREATE TABLE agent_releases (
    workspace_id        bigint NOT NULL,
    invocation_id       bigint NOT NULL,
    agent_id            bigint NOT NULL,
    -- Whether the agent is deleted once it has ended.
    deletes             boolean NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, invocation_id)
);
CREATE INDEX agent_releases_by_agent ON agent_releases (workspace_id, agent_id);
