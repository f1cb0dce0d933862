-- Limits of tenants. The body of an event is stored once, however many subscriptions it matches.

CREATE TABLE subscription_bodies (
    workspace_id        bigint NOT NULL,
    event_seq           bigint NOT NULL,
    -- The body as it is sent, the same to all subscriptions.
    body                text NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, event_seq)
);
CREATE INDEX subscription_bodies_by_age ON subscription_bodies (created_at);

-- Null: the body is in subscription_bodies. Not null: written by the previous version, or while one of its workers ran.
-- contract: while a worker of the previous version is live, no delivery without a body is written.
ALTER TABLE subscription_deliveries ALTER COLUMN body DROP NOT NULL;

-- Workers of the previous version find bodies in subscription_deliveries only. They renew their leases without this column.
ALTER TABLE push_workers ADD COLUMN reads_shared_bodies boolean NOT NULL DEFAULT false;

-- Texts of observer tokens expire; an override renews those that are still in use.
CREATE INDEX observer_tokens_by_signature ON observer_tokens (signed_until) WHERE revoked_at IS NULL;
