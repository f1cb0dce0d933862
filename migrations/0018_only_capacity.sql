-- Who may take an invocation, as told when it was made: it may be placed again later.

ALTER TABLE invocations
    -- Whether only a capacity will do, and no action that a node calls the same.
    ADD COLUMN only_capacity    boolean NOT NULL DEFAULT false;
