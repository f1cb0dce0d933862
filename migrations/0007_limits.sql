-- Request budgets and what operators set apart from plans.

-- What a workspace may use, where it differs from its plan. Null: as the plan says.
CREATE TABLE quotas (
    workspace_id        bigint PRIMARY KEY,
    requests_per_minute integer,
    agents              integer,
    channels            integer,
    nodes               integer,
    webhooks            integer,
    subscriptions       integer,
    observer_tokens     integer,
    file_bytes          bigint,
    updated_at          timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT request_budget_is_usable CHECK (requests_per_minute BETWEEN 10 AND 1000000),
    CONSTRAINT ceilings_are_not_negative CHECK (
        least(agents, channels, nodes, webhooks, subscriptions, observer_tokens) >= 0 AND file_bytes >= 0
    )
);

-- What gateways have taken of a budget in its newest minute, ahead of use. After a crash of Postgres the
-- minute starts over, which is cheaper than a log.
CREATE UNLOGGED TABLE rate_budgets (
    workspace_id        bigint NOT NULL,
    -- The budget's name; with a caller's behind a colon, that caller's part of it.
    account             text NOT NULL,
    -- Number of the minute, as the gateways count them.
    minute              bigint NOT NULL,
    taken               integer NOT NULL,
    -- What the last taking got.
    given               integer NOT NULL,
    PRIMARY KEY (workspace_id, account)
) WITH (fillfactor = 50);
CREATE INDEX rate_budgets_by_minute ON rate_budgets (minute);
