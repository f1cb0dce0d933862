-- Actions: what nodes and agents can be asked to do, and every time that they were.

-- What a heartbeat's load means: a broker without a limit of its own says 0 and means nothing by it.
ALTER TABLE providers ADD COLUMN load_measured boolean NOT NULL DEFAULT false;

-- What each provider of a broker node advertises, found by name. Replaced with each registration; outlives the
-- connection, so that it is known what a node that is away can do.
CREATE TABLE node_capabilities (
    workspace_id        bigint NOT NULL,
    name                text NOT NULL,
    node_id             text NOT NULL,
    provider            text NOT NULL,
    -- action: something that this node does. capacity: something that any node with it can do.
    kind                text NOT NULL,
    -- Whether invocations wait while the provider is away.
    queue               boolean NOT NULL,
    -- Whether its frames tell who calls.
    tells_caller        boolean NOT NULL,
    PRIMARY KEY (workspace_id, name, node_id, provider),
    CONSTRAINT capability_kind_is_known CHECK (kind IN ('action', 'capacity'))
);
CREATE INDEX node_capabilities_by_provider ON node_capabilities (workspace_id, node_id, provider);

CREATE TABLE actions (
    workspace_id        bigint NOT NULL,
    action_id           bigint NOT NULL,
    name                text NOT NULL,
    description         text NOT NULL DEFAULT '',
    -- Whether the name alone leads to it. Otherwise only its node's route does.
    claims_name         boolean NOT NULL,
    handler_agent_id    bigint,
    handler_node_id     text,
    -- The provider whose capability it is. Null: defined by REST, and kept until it is deleted there.
    provider            text,
    input_schema        json NOT NULL DEFAULT '{}',
    output_schema       json NOT NULL DEFAULT '{}',
    -- Names of the agents that may invoke it; null: all.
    available_to        text[],
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, action_id),
    CONSTRAINT an_action_has_one_handler CHECK (num_nonnulls(handler_agent_id, handler_node_id) = 1),
    CONSTRAINT only_nodes_have_providers CHECK (provider IS NULL OR handler_node_id IS NOT NULL)
);
CREATE UNIQUE INDEX actions_name_is_claimed_once ON actions (workspace_id, name) WHERE claims_name;
CREATE UNIQUE INDEX actions_name_is_unique_on_a_node
    ON actions (workspace_id, handler_node_id, name) WHERE handler_node_id IS NOT NULL;

CREATE TABLE invocations (
    workspace_id        bigint NOT NULL,
    invocation_id       bigint NOT NULL,
    action_name         text NOT NULL,
    -- What its node must advertise, and what the frame calls it. Null: an agent handles it.
    capability          text,
    handler_agent_id    bigint,
    -- The only node that may do it. Null: any with the capability.
    target_node_id      text,
    -- Null: the holder of the workspace's key.
    caller_id           bigint,
    caller_name         text NOT NULL,
    input               json NOT NULL,
    output              json,
    error               text,
    duration_ms         bigint,
    -- pending, dispatched, invoked, completed or failed.
    status              text NOT NULL,
    -- How often a provider was picked: what an older attempt brings is refused.
    attempt             integer NOT NULL DEFAULT 0,
    -- Where the newest attempt went.
    node_id             text,
    provider            text,
    dispatched_at       timestamptz,
    -- Takes a place among its provider's agents until it ends, or its agent has come up.
    reserves            boolean NOT NULL DEFAULT false,
    tells_caller        boolean NOT NULL DEFAULT false,
    -- The epoch of the connection that it was written to. Null: not written yet.
    sent_epoch          bigint,
    sent_at             timestamptz,
    -- Nodes where an attempt came to nothing.
    tried               text[] NOT NULL DEFAULT '{}',
    -- When a worker looks at it next.
    due_at              timestamptz NOT NULL,
    -- Since when nobody could be sent it.
    unreachable_since   timestamptz,
    -- Whether its outcome goes into the caller's mailbox.
    durable             boolean NOT NULL DEFAULT false,
    -- Whether the outcome was written to the caller's socket.
    told                boolean NOT NULL DEFAULT false,
    -- The agent that came up by it.
    agent_id            bigint,
    -- What its provider's inventory said of that agent. The provider's own result, if it follows at once, counts more.
    came_up             json,
    came_up_at          timestamptz,
    -- Why it went where it went: one object per attempt, the newest last.
    placements          json NOT NULL DEFAULT '[]',
    created_at          timestamptz NOT NULL,
    completed_at        timestamptz,
    PRIMARY KEY (workspace_id, invocation_id),
    CONSTRAINT invocation_status_is_known
        CHECK (status IN ('pending', 'dispatched', 'invoked', 'completed', 'failed')),
    CONSTRAINT final_iff_completed_at CHECK ((status IN ('completed', 'failed')) = (completed_at IS NOT NULL)),
    CONSTRAINT a_node_or_an_agent_handles CHECK (num_nonnulls(capability, handler_agent_id) = 1),
    CONSTRAINT only_agents_are_invoked CHECK (status <> 'invoked' OR handler_agent_id IS NOT NULL),
    CONSTRAINT dispatched_to_a_provider
        CHECK (status <> 'dispatched' OR (node_id IS NOT NULL AND provider IS NOT NULL AND attempt > 0)),
    CONSTRAINT reserves_only_while_dispatched CHECK (NOT reserves OR status = 'dispatched'),
    CONSTRAINT failed_with_an_error CHECK ((status = 'failed') = (error IS NOT NULL))
) WITH (fillfactor = 70);
-- How many are open, per workspace and action.
CREATE INDEX invocations_open ON invocations (workspace_id, action_name) WHERE completed_at IS NULL;
-- What a worker has to look at.
CREATE INDEX invocations_due ON invocations (due_at) WHERE completed_at IS NULL;
-- What a provider is doing.
CREATE INDEX invocations_at_provider ON invocations (workspace_id, node_id, provider) WHERE status = 'dispatched';
-- What waits for a node.
CREATE INDEX invocations_waiting ON invocations (workspace_id, target_node_id) WHERE status = 'pending';
-- What gateways have not written to a socket yet.
CREATE INDEX invocations_unsent ON invocations (created_at)
    WHERE sent_epoch IS NULL AND status IN ('dispatched', 'invoked');
-- What agents handle.
CREATE INDEX invocations_of_handler ON invocations (workspace_id, handler_agent_id) WHERE status = 'invoked';
-- What inventories show to be done.
CREATE INDEX invocations_came_up ON invocations (came_up_at) WHERE completed_at IS NULL AND came_up_at IS NOT NULL;
-- Outcomes that callers have not been told.
CREATE INDEX invocations_untold ON invocations (workspace_id, caller_id)
    WHERE completed_at IS NOT NULL AND NOT told AND caller_id IS NOT NULL;
CREATE INDEX invocations_by_age ON invocations (completed_at) WHERE completed_at IS NOT NULL;
