-- Files, inbound webhooks, event subscriptions and session events.
--
-- Tables without a tenant: secret_keys.

-- What is known of a file. Its bytes are objects in the storage of files.
CREATE TABLE files (
    workspace_id        bigint NOT NULL,
    file_id             bigint NOT NULL,
    -- Shown and offered as a name for the download; never part of a path.
    filename            text NOT NULL,
    content_type        text NOT NULL,
    -- As declared; an upload of another size is refused.
    size_bytes          bigint NOT NULL,
    -- Who uploads it.
    agent_id            bigint NOT NULL,
    -- pending, complete or deleted.
    status              text NOT NULL DEFAULT 'pending',
    -- The upload that the file consists of; null before there is one.
    object_id           bigint,
    created_at          timestamptz NOT NULL,
    -- A file that is not complete by then is given up.
    expires_at          timestamptz NOT NULL,
    completed_at        timestamptz,
    deleted_at          timestamptz,
    PRIMARY KEY (workspace_id, file_id),
    CONSTRAINT file_status_is_known CHECK (status IN ('pending', 'complete', 'deleted')),
    CONSTRAINT file_has_bytes CHECK (size_bytes > 0),
    CONSTRAINT complete_file_has_an_object CHECK (status <> 'complete' OR object_id IS NOT NULL),
    CONSTRAINT deleted_at_iff_file_is_deleted CHECK ((status = 'deleted') = (deleted_at IS NOT NULL))
);
CREATE INDEX files_listed ON files (workspace_id, file_id) WHERE status = 'complete';
CREATE INDEX files_by_agent ON files (workspace_id, agent_id, file_id) WHERE status = 'complete';
CREATE INDEX files_pending ON files (expires_at) WHERE status = 'pending';
CREATE INDEX files_deleted ON files (deleted_at) WHERE status = 'deleted';

-- Objects of the storage of files. The row is written before the object's first byte, and goes after its
-- last one: nothing is there that no row names.
CREATE TABLE file_objects (
    workspace_id        bigint NOT NULL,
    file_id             bigint NOT NULL,
    object_id           bigint NOT NULL,
    -- From then on the worker removes it. Null while a file consists of it.
    remove_after        timestamptz,
    -- A worker is at it: no file may take it any more.
    removing            boolean NOT NULL DEFAULT false,
    PRIMARY KEY (workspace_id, file_id, object_id)
);
CREATE INDEX file_objects_to_remove ON file_objects (remove_after) WHERE remove_after IS NOT NULL;

-- Inbound webhooks: whoever has the token posts to the channel.
CREATE TABLE webhooks (
    workspace_id        bigint NOT NULL,
    webhook_id          bigint NOT NULL,
    name                text NOT NULL,
    channel_id          bigint NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, webhook_id)
);

ALTER TABLE tokens ADD COLUMN webhook_id bigint;
ALTER TABLE tokens DROP CONSTRAINT token_kind_is_known;
ALTER TABLE tokens ADD CONSTRAINT token_kind_is_known
    CHECK (kind IN ('workspace', 'agent', 'node', 'observer', 'webhook'));
ALTER TABLE tokens ADD CONSTRAINT webhook_token_names_a_webhook
    CHECK ((kind = 'webhook') = (webhook_id IS NOT NULL));
CREATE UNIQUE INDEX tokens_one_per_webhook ON tokens (workspace_id, webhook_id) WHERE kind = 'webhook';

-- Event subscriptions: which events go to which address.
CREATE TABLE subscriptions (
    workspace_id        bigint NOT NULL,
    subscription_id     bigint NOT NULL,
    -- Event kinds; `*` is all of them.
    events              text[] NOT NULL,
    -- {channel?, mentions?} or null.
    filter              jsonb,
    url                 text NOT NULL,
    header_names        text[] NOT NULL DEFAULT '{}',
    -- relay (the default scheme) or standard-webhooks; null without a secret.
    signature_scheme    text,
    -- {secret, headers}, sealed with a key of this id; null when there is neither.
    secret_key_id       text,
    sealed              bytea,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, subscription_id),
    CONSTRAINT subscription_has_events CHECK (cardinality(events) > 0),
    CONSTRAINT key_id_iff_sealed CHECK ((secret_key_id IS NULL) = (sealed IS NULL))
);

-- Events on their way to an address. Written and worked off by the worker.
CREATE TABLE subscription_deliveries (
    workspace_id        bigint NOT NULL,
    subscription_id     bigint NOT NULL,
    delivery_id         bigint NOT NULL,
    event_kind          text NOT NULL,
    -- The body as it is sent.
    body                text NOT NULL,
    -- pending, delivered or dead_letter.
    status              text NOT NULL DEFAULT 'pending',
    attempts            integer NOT NULL DEFAULT 0,
    last_status         smallint,
    last_error          text,
    next_attempt_at     timestamptz,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz,
    PRIMARY KEY (workspace_id, subscription_id, delivery_id),
    CONSTRAINT subscription_delivery_status_is_known CHECK (status IN ('pending', 'delivered', 'dead_letter')),
    CONSTRAINT next_attempt_iff_pending CHECK ((status = 'pending') = (next_attempt_at IS NOT NULL))
);
CREATE INDEX subscription_deliveries_due ON subscription_deliveries (next_attempt_at) WHERE status = 'pending';
CREATE INDEX subscription_deliveries_by_age ON subscription_deliveries (created_at);

-- What an agent's session reports. Numbered per agent from 1, in the order of commits.
CREATE TABLE session_events (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    sequence            bigint NOT NULL,
    event_id            bigint NOT NULL,
    type                text NOT NULL,
    payload             json NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, agent_id, sequence)
);
CREATE INDEX session_events_by_type ON session_events (workspace_id, agent_id, type, sequence);
CREATE INDEX session_events_by_age ON session_events (created_at);

-- The next sequence of an agent's session events. Its row lock puts their effects in order.
CREATE TABLE session_heads (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    next_sequence       bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (workspace_id, agent_id)
) WITH (fillfactor = 40);

-- Agents that are not offline, for the look at who has gone silent. Does not index what changes with each
-- sign of life.
CREATE INDEX agents_present ON agents (workspace_id, agent_id) WHERE deleted_at IS NULL AND status <> 'offline';

-- Keys made by the engine itself where none is configured, so that all gateways have the same. Use
-- configured keys in production: whoever can read this table can read what they seal.
CREATE TABLE secret_keys (
    key_id              text PRIMARY KEY,
    key                 bytea NOT NULL,
    created_at          timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT key_has_32_bytes CHECK (octet_length(key) = 32)
);
