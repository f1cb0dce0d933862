-- Open fan-outs (ADR 0060): messages with many recipients, whose deliveries are written in chunks after the transaction
-- that accepted the message. It fixed the recipients, in the order of their agents; the last chunk removes the row.
CREATE TABLE fanouts (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    sender_id           bigint NOT NULL,
    channel_id          bigint NOT NULL,
    created_on          date NOT NULL,
    created_at          timestamptz NOT NULL,
    -- Those of the deliveries.
    expires_at          timestamptz NOT NULL,
    traceparent         text,
    -- Of equal length. Stored out of line and not written again by an update of the other columns.
    agents              bigint[] NOT NULL,
    modes               smallint[] NOT NULL,
    reasons             smallint[] NOT NULL,
    -- Recipients that earlier chunks have dealt with.
    written             int NOT NULL DEFAULT 0,
    -- Process that writes the chunks; 0: not a gateway. Another one continues after `claimed_until`, or without a lease
    -- of this gateway. A hint only: a chunk is written by whoever advances `written`.
    gateway_id          bigint NOT NULL,
    claimed_until       timestamptz NOT NULL,
    CONSTRAINT fanouts_pkey PRIMARY KEY (workspace_id, message_id),
    CONSTRAINT fanout_has_recipients_left CHECK (written < cardinality(agents)),
    CONSTRAINT fanout_recipients_have_mode_and_reason
        CHECK (cardinality(agents) = cardinality(modes) AND cardinality(agents) = cardinality(reasons))
);
-- A later send of the same author waits.
CREATE INDEX fanouts_by_sender ON fanouts (workspace_id, sender_id, message_id);

-- Agents whose deliveries a chunk's outbox row is about. NULL: all deliveries of its messages.
ALTER TABLE outbox ADD COLUMN first_agent bigint, ADD COLUMN last_agent bigint;
