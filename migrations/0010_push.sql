-- Nodes of kind http_push and poll: who serves which mailbox, what was tried, what is leased to whom.
--
-- Without a tenant is push_workers alone.

-- The secrets of a node's delivery settings, sealed; `delivery` holds the rest.
ALTER TABLE nodes ADD COLUMN sealed_key_id text, ADD COLUMN sealed bytea,
    ADD CONSTRAINT sealed_with_a_key CHECK ((sealed IS NULL) = (sealed_key_id IS NULL)) NOT VALID;
CREATE INDEX nodes_pushed_to ON nodes (workspace_id, node_id) WHERE kind = 'http_push';

-- How often the row was tried or reported as failed for a while, in a row: what the next pause follows from. A
-- deferred row with retries comes back because the engine says so, one without because its recipient does.
ALTER TABLE delivery_exceptions ADD COLUMN retry_no smallint NOT NULL DEFAULT 0;

-- The mailboxes of agents on http_push nodes. A mailbox is leased as a whole, to one worker at a time; the worker's
-- own lease says for how long.
CREATE TABLE push_mailboxes (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    -- The location that this is about: the agent may have moved on.
    node_id             text NOT NULL,
    -- Everything up to here has been handed over at this location, is settled, or is deferred.
    pushed_seq          bigint NOT NULL DEFAULT 0,
    -- When to look at it; null when nothing is known to be due.
    due_at              timestamptz,
    owner               bigint,
    -- Rises with each owner.
    epoch               bigint NOT NULL DEFAULT 0,
    -- Nothing goes before due_at: the delivery that is next in order waits for its next try.
    is_blocked          boolean NOT NULL DEFAULT false,
    -- The endpoint has said that it is gone: nothing is sent until the agent is bound again.
    disabled_at         timestamptz,
    disabled_reason     text,
    PRIMARY KEY (workspace_id, agent_id),
    CONSTRAINT disabled_for_a_reason CHECK ((disabled_at IS NULL) = (disabled_reason IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX push_mailboxes_due ON push_mailboxes (due_at)
    WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL;
CREATE INDEX push_mailboxes_owned ON push_mailboxes (owner) WHERE owner IS NOT NULL;
CREATE INDEX push_mailboxes_of_node ON push_mailboxes (workspace_id, node_id);

-- What all workers know of an endpoint: its circuit breaker, and until when it asked to be left alone.
CREATE TABLE push_endpoints (
    workspace_id        bigint NOT NULL,
    node_id             text NOT NULL,
    -- Failures in a row.
    failures            integer NOT NULL DEFAULT 0,
    -- Not tried before this.
    open_until          timestamptz,
    -- One worker tries it: nobody else before this.
    probe_until         timestamptz,
    -- Asked to slow down.
    paused_until        timestamptz,
    PRIMARY KEY (workspace_id, node_id)
) WITH (fillfactor = 50);

-- One row for each try to hand a delivery over by http_push.
CREATE TABLE delivery_attempts (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    seq                 bigint NOT NULL,
    -- A snowflake, so that tries are in order.
    attempt_id          bigint NOT NULL,
    created_on          date NOT NULL,
    node_id             text NOT NULL,
    attempted_at        timestamptz NOT NULL,
    latency_ms          integer NOT NULL,
    -- Null when no answer came.
    status              smallint,
    -- What began the answer, 1 KiB at most.
    answer              bytea,
    error               text,
    PRIMARY KEY (workspace_id, agent_id, seq, attempt_id, created_on)
) PARTITION BY RANGE (created_on);

-- Deliveries handed to a consumer that claimed them, on a node of kind poll.
CREATE TABLE delivery_claims (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    seq                 bigint NOT NULL,
    claim_id            bigint NOT NULL,
    leased_until        timestamptz NOT NULL,
    claim_count         integer NOT NULL DEFAULT 1,
    PRIMARY KEY (workspace_id, agent_id, seq)
) WITH (fillfactor = 70);
CREATE INDEX delivery_claims_by_lease ON delivery_claims (leased_until);

CREATE TABLE push_workers (
    owner               bigint PRIMARY KEY,
    lease_until         timestamptz NOT NULL
);

SELECT relay_ensure_partitions(7);
