-- Numbers that a recovery skips in a mailbox which holds something: one row for each run of them, not one for each number.

CREATE TABLE skipped_seqs (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    -- From here to there no delivery has a number. All of them count as settled.
    first_seq           bigint NOT NULL,
    last_seq            bigint NOT NULL,
    at                  timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, agent_id, last_seq),
    CONSTRAINT a_run_is_not_empty CHECK (first_seq BETWEEN 1 AND last_seq)
);
