-- Dispatch of event subscriptions; what operators do with dead letters.

-- A subscription is served by one worker at a time, in the order of its workspace's events.
ALTER TABLE subscriptions
    -- The last event that was looked at; null (made by an older version) begins with the next one.
    ADD COLUMN event_cursor     bigint,
    ADD COLUMN is_active        boolean NOT NULL DEFAULT true,
    -- gone or failing.
    ADD COLUMN disabled_reason  text,
    ADD COLUMN disabled_at      timestamptz,
    -- Failed tries in a row, and since when.
    ADD COLUMN failures         integer NOT NULL DEFAULT 0,
    ADD COLUMN failing_since    timestamptz,
    -- Nothing is sent before this.
    ADD COLUMN blocked_until    timestamptz,
    ADD COLUMN lease_owner      text,
    -- Rises with each lease: what an earlier holder still writes is fenced off.
    ADD COLUMN lease_epoch      bigint NOT NULL DEFAULT 0,
    ADD COLUMN lease_until      timestamptz;
ALTER TABLE subscriptions
    ADD CONSTRAINT disabled_iff_not_active CHECK (is_active = (disabled_at IS NULL)) NOT VALID,
    ADD CONSTRAINT failing_since_the_first_failure CHECK ((failures = 0) = (failing_since IS NULL)) NOT VALID;

-- The number of the event; 0 for rows of an older version.
ALTER TABLE subscription_deliveries ADD COLUMN event_seq bigint NOT NULL DEFAULT 0;
CREATE UNIQUE INDEX subscription_deliveries_once_an_event
    ON subscription_deliveries (workspace_id, subscription_id, event_seq) WHERE event_seq > 0;
CREATE INDEX subscription_deliveries_in_order
    ON subscription_deliveries (workspace_id, subscription_id, event_seq, delivery_id) WHERE status = 'pending';

-- A dead letter's `reason` says why; null is an expired one of an older version. A letter that was redriven names
-- the seq of the delivery that took its place in the same mailbox; one that was purged is not listed any more.
ALTER TABLE delivery_exceptions
    ADD COLUMN redriven_seq     bigint,
    ADD COLUMN redriven_at      timestamptz,
    ADD COLUMN purged_at        timestamptz;
ALTER TABLE delivery_exceptions
    ADD CONSTRAINT redriven_seq_iff_redriven CHECK ((redriven_seq IS NULL) = (redriven_at IS NULL)) NOT VALID;
CREATE INDEX dead_letters_by_age ON delivery_exceptions (workspace_id, at, agent_id, seq) WHERE state = 4;

-- Agents whose mailboxes may still hold something that nobody will take.
CREATE INDEX agents_deleted ON agents (deleted_at) WHERE deleted_at IS NOT NULL;

-- Redrives by filter, worked off by the workers.
CREATE TABLE redrives (
    workspace_id        bigint NOT NULL,
    redrive_id          bigint NOT NULL,
    -- {agent_id?, node_id?, reason?}
    filter              jsonb NOT NULL,
    -- Letters of this time, and no later ones: what dies again meanwhile is not redriven by the same redrive.
    from_at             timestamptz NOT NULL,
    until_at            timestamptz NOT NULL,
    -- Letters a second.
    rate                integer NOT NULL,
    -- The last letter that was looked at.
    position_at         timestamptz,
    position_agent      bigint,
    position_seq        bigint,
    matched             bigint NOT NULL,
    redriven            bigint NOT NULL DEFAULT 0,
    -- Not sent again: three times already, the mailbox is full, or the agent or the message is gone.
    refused             bigint NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL,
    -- When the next letters are due; null once it is finished.
    next_at             timestamptz,
    finished_at         timestamptz,
    PRIMARY KEY (workspace_id, redrive_id),
    CONSTRAINT rate_is_positive CHECK (rate > 0),
    CONSTRAINT next_at_until_finished CHECK ((next_at IS NULL) = (finished_at IS NOT NULL))
);
CREATE INDEX redrives_due ON redrives (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX redrives_by_age ON redrives (created_at);
