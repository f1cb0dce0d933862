-- Minimum interval of a trigger. A match claims the interval before it invokes the action, in one statement, so that
-- several workers start one invocation. The message of the claim may repeat it: its invocation may have failed to start.
ALTER TABLE triggers
    ADD COLUMN min_interval_seconds integer NOT NULL DEFAULT 0
        CONSTRAINT trigger_interval_is_bounded CHECK (min_interval_seconds BETWEEN 0 AND 86400),
    ADD COLUMN interval_claimed_at timestamptz,
    ADD COLUMN interval_claimed_by bigint;
