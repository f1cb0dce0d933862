-- The spine: tenants, agents, nodes, channels, messages, deliveries.
--
-- Every tenant table's primary key leads with workspace_id, so that the schema can be distributed by
-- tenant. The tables without a tenant are exactly these, at the end of this file:
-- tokens (what finds the tenant), outbox, gateways, worker_ids, loop_state.
--
-- messages, deliveries and ack_log are partitioned by their own creation day (UTC), which is part of
-- the key. A message's day follows from its id.

CREATE TABLE workspaces (
    workspace_id        bigint PRIMARY KEY,
    name                text NOT NULL,
    plan                text NOT NULL DEFAULT 'enterprise',
    system_prompt       text,
    metadata            jsonb NOT NULL DEFAULT '{}',
    provenance          jsonb,
    -- Deliveries of this workspace expire after this long.
    delivery_ttl_seconds integer NOT NULL DEFAULT 3600,
    -- Unsettled deliveries that one mailbox may hold.
    mailbox_depth       integer NOT NULL DEFAULT 1000,
    created_at          timestamptz NOT NULL,
    expires_at          timestamptz,
    deleted_at          timestamptz,
    CONSTRAINT delivery_ttl_is_between_a_minute_and_six_days
        CHECK (delivery_ttl_seconds BETWEEN 60 AND 518400),
    CONSTRAINT mailbox_depth_is_positive CHECK (mailbox_depth > 0)
);
CREATE INDEX workspaces_by_name ON workspaces (name, workspace_id);

CREATE TABLE agents (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    name                text NOT NULL,
    type                text NOT NULL DEFAULT 'agent',
    persona             text,
    metadata            jsonb NOT NULL DEFAULT '{}',
    capabilities        jsonb,
    skills              jsonb,
    -- active, idle, blocked, waiting or offline.
    status              text NOT NULL DEFAULT 'active',
    -- Raised by each rotation: a send relies on the generation it was authenticated with.
    token_generation    bigint NOT NULL DEFAULT 1,
    -- The one active location. The node is the implicit direct node unless a binding says otherwise.
    node_id             text NOT NULL,
    -- Null: any provider of the node (bound by REST, not yet claimed by an inventory).
    provider            text,
    binding_id          text,
    session_ref         text,
    resumable           boolean,
    priority            integer NOT NULL DEFAULT 0,
    bound_at            timestamptz,
    rebound_at          timestamptz,
    created_at          timestamptz NOT NULL,
    last_seen_at        timestamptz NOT NULL,
    deleted_at          timestamptz,
    PRIMARY KEY (workspace_id, agent_id),
    CONSTRAINT agent_type_is_known CHECK (type IN ('agent', 'human', 'system')),
    CONSTRAINT agent_status_is_known
        CHECK (status IN ('active', 'idle', 'blocked', 'waiting', 'offline')),
    CONSTRAINT binding_id_iff_bound CHECK ((binding_id IS NULL) = (bound_at IS NULL))
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX agents_name_is_unique_while_alive
    ON agents (workspace_id, name) WHERE deleted_at IS NULL;
CREATE INDEX agents_by_node ON agents (workspace_id, node_id) WHERE deleted_at IS NULL;

CREATE TABLE nodes (
    workspace_id        bigint NOT NULL,
    node_id             text NOT NULL,
    name                text NOT NULL,
    kind                text NOT NULL DEFAULT 'ws',
    role                text NOT NULL DEFAULT 'broker',
    machine_id          text,
    delivery_adapter    text NOT NULL DEFAULT 'ws.node.v1',
    delivery            jsonb,
    -- Capabilities given by REST; providers bring their own.
    capabilities        jsonb NOT NULL DEFAULT '[]',
    tags                text[] NOT NULL DEFAULT '{}',
    version             text,
    max_agents          integer NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz,
    PRIMARY KEY (workspace_id, node_id),
    CONSTRAINT node_kind_is_known CHECK (kind IN ('ws', 'http_push', 'poll')),
    CONSTRAINT node_role_is_known CHECK (role IN ('direct', 'broker'))
);
CREATE UNIQUE INDEX nodes_name_is_unique ON nodes (workspace_id, name);

-- One process serving a node. The row outlives the connection; `epoch` fences what a connection may
-- change about its node, and rises with each register of a new instance.
CREATE TABLE providers (
    workspace_id        bigint NOT NULL,
    node_id             text NOT NULL,
    provider            text NOT NULL,
    instance_id         text NOT NULL,
    epoch               bigint NOT NULL,
    -- Null when not connected.
    gateway_id          bigint,
    capabilities        jsonb NOT NULL DEFAULT '[]',
    cursor_granted      boolean NOT NULL DEFAULT false,
    tags                text[] NOT NULL DEFAULT '{}',
    version             text,
    max_agents          integer NOT NULL DEFAULT 0,
    active_agents       integer NOT NULL DEFAULT 0,
    load                double precision NOT NULL DEFAULT 0,
    handlers_live       boolean NOT NULL DEFAULT false,
    registered_at       timestamptz NOT NULL,
    last_heartbeat_at   timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, node_id, provider)
) WITH (fillfactor = 80);
-- Who is connected where: dead gateways and the liveness sweep look through this.
CREATE INDEX providers_connected ON providers (gateway_id) WHERE gateway_id IS NOT NULL;

CREATE TABLE channels (
    workspace_id        bigint NOT NULL,
    channel_id          bigint NOT NULL,
    name                text NOT NULL,
    -- 0 channel, 1 one-to-one conversation, 2 group conversation.
    type                smallint NOT NULL DEFAULT 0,
    -- What clients call a conversation; null for channels.
    conversation_id     text,
    -- A group conversation's own name.
    title               text,
    topic               text,
    metadata            jsonb NOT NULL DEFAULT '{}',
    created_by          bigint,
    -- Raised with every change of membership or mute: a send relies on the version it resolved with.
    members_version     bigint NOT NULL DEFAULT 1,
    created_at          timestamptz NOT NULL,
    archived_at         timestamptz,
    PRIMARY KEY (workspace_id, channel_id),
    CONSTRAINT conversation_id_iff_conversation CHECK ((type = 0) = (conversation_id IS NULL))
);
CREATE UNIQUE INDEX channels_name_is_unique ON channels (workspace_id, name);
CREATE UNIQUE INDEX channels_conversation_is_unique
    ON channels (workspace_id, conversation_id) WHERE conversation_id IS NOT NULL;

CREATE TABLE channel_members (
    workspace_id        bigint NOT NULL,
    channel_id          bigint NOT NULL,
    agent_id            bigint NOT NULL,
    role                text NOT NULL DEFAULT 'member',
    muted               boolean NOT NULL DEFAULT false,
    joined_at           timestamptz NOT NULL,
    -- Explicitly read up to here; what socket acks read is derived from the ack floor.
    last_read_id        bigint,
    last_read_at        timestamptz,
    PRIMARY KEY (workspace_id, channel_id, agent_id)
);
CREATE INDEX channel_members_by_agent ON channel_members (workspace_id, agent_id);

CREATE TABLE messages (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    created_on          date NOT NULL,
    channel_id          bigint NOT NULL,
    agent_id            bigint NOT NULL,
    agent_name          text NOT NULL,
    agent_type          text NOT NULL DEFAULT 'agent',
    -- The root of the thread; null for a root.
    thread_id           bigint,
    text                text NOT NULL,
    blocks              json,
    metadata            json NOT NULL DEFAULT '{}',
    attachments         json NOT NULL DEFAULT '[]',
    mentions            text[] NOT NULL DEFAULT '{}',
    -- wait or steer.
    mode                text NOT NULL DEFAULT 'wait',
    content_type        text,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, message_id, created_on)
) PARTITION BY RANGE (created_on);
CREATE INDEX messages_by_channel ON messages (workspace_id, channel_id, message_id)
    WHERE thread_id IS NULL;
CREATE INDEX messages_by_thread ON messages (workspace_id, thread_id, message_id)
    WHERE thread_id IS NOT NULL;

-- Explicit reads (POST …/read). Reads that follow from an ack are derived, not stored here.
CREATE TABLE message_reads (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    agent_id            bigint NOT NULL,
    read_at             timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, message_id, agent_id)
);

-- One row per recipient, written once and never updated. What becomes of it is told by the two floors
-- of its mailbox and, for rows settled one by one, by delivery_exceptions.
CREATE TABLE deliveries (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    seq                 bigint NOT NULL,
    created_on          date NOT NULL,
    -- 0 message, 1 action_result, 2 notice.
    source_kind         smallint NOT NULL DEFAULT 0,
    source_id           bigint NOT NULL,
    redrive_no          smallint NOT NULL DEFAULT 0,
    channel_id          bigint,
    -- Where the agent was when the row was written.
    node_id             text NOT NULL,
    -- 0 immediate (wire: wait), 1 next-tool-call (wire: steer).
    mode                smallint NOT NULL DEFAULT 0,
    -- 0 message, 1 mention, 2 dm, 3 thread-reply, 4 action-result, 5 notification.
    reason              smallint NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL,
    expires_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, agent_id, seq, created_on),
    CONSTRAINT seq_starts_at_one CHECK (seq >= 1)
) PARTITION BY RANGE (created_on);
CREATE INDEX deliveries_by_source ON deliveries (workspace_id, source_id, agent_id);
CREATE INDEX deliveries_by_expiry ON deliveries (expires_at);

-- The two halves of a mailbox's position, apart so that readers of cursors never wait for writers of
-- heads. Neither indexes a column that changes, so updates stay within their page.
CREATE TABLE mailbox_heads (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    next_seq            bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (workspace_id, agent_id),
    CONSTRAINT next_seq_is_positive CHECK (next_seq >= 1)
) WITH (fillfactor = 40);

CREATE TABLE mailbox_cursors (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    -- Highest seq known to have been written to a socket.
    sent_seq            bigint NOT NULL DEFAULT 0,
    -- Acknowledged over a socket up to here. Moves by socket acks only.
    ack_floor           bigint NOT NULL DEFAULT 0,
    -- Every row up to here is settled by whatever means.
    settled_floor       bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (workspace_id, agent_id),
    CONSTRAINT what_is_acked_is_settled CHECK (settled_floor >= ack_floor)
) WITH (fillfactor = 40);

-- Rows settled or parked otherwise than by the ack floor.
CREATE TABLE delivery_exceptions (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    seq                 bigint NOT NULL,
    -- 1 acked by REST, 2 failed, 3 deferred, 4 dead-lettered.
    state               smallint NOT NULL,
    error               text,
    retryable           boolean,
    reason              text,
    available_at        timestamptz,
    at                  timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, agent_id, seq),
    CONSTRAINT exception_state_is_known CHECK (state BETWEEN 1 AND 4),
    CONSTRAINT available_at_iff_deferred CHECK ((state = 3) = (available_at IS NOT NULL))
);

-- When a mailbox's ack floor stood where, to the second: the source of acked_at and read_at.
CREATE TABLE ack_log (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    acked_at            timestamptz NOT NULL,
    created_on          date NOT NULL,
    ack_floor           bigint NOT NULL,
    PRIMARY KEY (workspace_id, agent_id, acked_at, created_on)
) PARTITION BY RANGE (created_on);

CREATE TABLE idempotency_keys (
    workspace_id        bigint NOT NULL,
    -- SHA-256 over actor, operation, target and key.
    key_hash            bytea NOT NULL,
    -- SHA-256 over the request body.
    fingerprint         bytea NOT NULL,
    status              smallint NOT NULL,
    response            jsonb NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, key_hash)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

-- Tables without a tenant --------------------------------------------------------------------------

-- Finds the tenant of a token. Holds SHA-256 of the whole token string, never the token.
CREATE TABLE tokens (
    token_hash          bytea PRIMARY KEY,
    -- workspace, agent or node.
    kind                text NOT NULL,
    workspace_id        bigint NOT NULL,
    agent_id            bigint,
    node_id             text,
    created_at          timestamptz NOT NULL,
    CONSTRAINT token_kind_is_known CHECK (kind IN ('workspace', 'agent', 'node')),
    CONSTRAINT agent_token_names_an_agent CHECK ((kind = 'agent') = (agent_id IS NOT NULL)),
    CONSTRAINT node_token_names_a_node CHECK ((kind = 'node') = (node_id IS NOT NULL))
);
CREATE UNIQUE INDEX tokens_one_per_agent ON tokens (workspace_id, agent_id) WHERE kind = 'agent';
CREATE UNIQUE INDEX tokens_one_per_node ON tokens (workspace_id, node_id) WHERE kind = 'node';

-- What a committed batch still owes NATS: the messages whose deliveries are to be published, and
-- (from the API issue on) the batch's events.
CREATE TABLE outbox (
    batch_id            bigint PRIMARY KEY,
    gateway_id          bigint NOT NULL,
    -- [[workspace_id, message_id], …]
    sources             jsonb NOT NULL,
    events              jsonb NOT NULL DEFAULT '[]',
    traceparent         text,
    created_at          timestamptz NOT NULL DEFAULT now(),
    published_at        timestamptz
);
CREATE INDEX outbox_unpublished ON outbox (created_at) WHERE published_at IS NULL;
CREATE INDEX outbox_published ON outbox (published_at) WHERE published_at IS NOT NULL;

CREATE TABLE gateways (
    gateway_id          bigint PRIMARY KEY,
    started_at          timestamptz NOT NULL DEFAULT now(),
    lease_until         timestamptz NOT NULL
);

-- Worker numbers of the snowflake ids, leased so that no two live processes share one.
CREATE TABLE worker_ids (
    worker_id           smallint PRIMARY KEY,
    owner               text,
    lease_until         timestamptz NOT NULL,
    CONSTRAINT worker_id_fits_ten_bits CHECK (worker_id BETWEEN 0 AND 1023)
);
INSERT INTO worker_ids (worker_id, lease_until)
    SELECT n, '-infinity' FROM generate_series(0, 1023) AS n;

-- What a worker loop remembers between ticks.
CREATE TABLE loop_state (
    loop                text PRIMARY KEY,
    value               jsonb NOT NULL,
    updated_at          timestamptz NOT NULL
);

-- Creates the daily partitions from yesterday to `days_ahead` days from now, for every partitioned
-- table. Idempotent; two callers at once are serialised by the advisory lock.
CREATE FUNCTION relay_ensure_partitions(days_ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    day date;
    child text;
    made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('relay_partitions'));
    FOREACH parent IN ARRAY ARRAY['messages', 'deliveries', 'ack_log'] LOOP
        FOR day IN SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, days_ahead) AS n LOOP
            child := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass(child) IS NULL THEN
                EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                               child, parent, day, day + 1);
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
SELECT relay_ensure_partitions(7);
