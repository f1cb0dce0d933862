-- Observer tokens, the keys that sign them, and what every gateway must know of them.
--
-- Tables without a tenant: observer_overrides (read whole by every gateway) and signing_keys.

CREATE TABLE observer_tokens (
    workspace_id        bigint NOT NULL,
    token_id            bigint NOT NULL,
    name                text NOT NULL,
    description         text,
    scopes              text[] NOT NULL,
    filters             jsonb NOT NULL DEFAULT '{}',
    -- Raised with each rotation: token strings of earlier versions are dead.
    version             bigint NOT NULL DEFAULT 1,
    -- No token string that was ever signed for this row verifies after this; infinity if one has no end.
    signed_until        timestamptz NOT NULL,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz,
    expires_at          timestamptz,
    revoked_at          timestamptz,
    last_used_at        timestamptz,
    PRIMARY KEY (workspace_id, token_id),
    CONSTRAINT observer_token_has_a_scope CHECK (cardinality(scopes) > 0)
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX observer_tokens_name_is_unique_while_active
    ON observer_tokens (workspace_id, name) WHERE revoked_at IS NULL;
-- What retention looks through.
CREATE INDEX observer_tokens_by_revocation ON observer_tokens (revoked_at) WHERE revoked_at IS NOT NULL;

-- Opaque observer tokens: ot_live_ and hex. None are issued; rows come from elsewhere.
ALTER TABLE tokens ADD COLUMN observer_token_id bigint;
ALTER TABLE tokens DROP CONSTRAINT token_kind_is_known;
ALTER TABLE tokens ADD CONSTRAINT token_kind_is_known CHECK (kind IN ('workspace', 'agent', 'node', 'observer'));
ALTER TABLE tokens ADD CONSTRAINT observer_token_names_its_row
    CHECK ((kind = 'observer') = (observer_token_id IS NOT NULL));
CREATE INDEX tokens_by_observer ON tokens (workspace_id, observer_token_id) WHERE kind = 'observer';

-- What has become of a token since it was signed: wins over what the token says of itself. A token that
-- was never changed has no row here.
CREATE TABLE observer_overrides (
    token_id            bigint PRIMARY KEY,
    workspace_id        bigint NOT NULL,
    -- live, revoked or workspace_deleted.
    state               text NOT NULL,
    -- The one version whose strings are alive.
    version             bigint NOT NULL,
    scopes              text[] NOT NULL,
    filters             jsonb NOT NULL,
    expires_at          timestamptz,
    -- The transaction that wrote the row. A reader goes on from the oldest transaction that was under way
    -- when it last read, so that no commit is missed, however long it took.
    changed_in          xid8 NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT override_state_is_known CHECK (state IN ('live', 'revoked', 'workspace_deleted'))
);
CREATE INDEX observer_overrides_by_change ON observer_overrides (changed_in);

CREATE TABLE signing_keys (
    kid                 text PRIMARY KEY,
    -- Ed25519, 32 bytes.
    public_key          bytea NOT NULL,
    -- PKCS#8, sealed with AES-256-GCM (nonce, then ciphertext) where the gateway that made it had a
    -- secret for that; erased on retirement.
    private_key         bytea,
    -- Which secret, by a digest of it; null when not sealed.
    sealed_with         text,
    created_at          timestamptz NOT NULL,
    -- From then on no token that it signed verifies.
    retired_at          timestamptz,
    CONSTRAINT retired_key_has_no_private_half CHECK ((retired_at IS NULL) OR (private_key IS NULL))
);
