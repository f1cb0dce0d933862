-- Letters that a full mailbox has refused are tried again by later passes of the same redrive.

ALTER TABLE redrives
    -- Of the pass under way: letters that were sent again, that never can be, and that a full mailbox has refused.
    ADD COLUMN pass_redriven    bigint NOT NULL DEFAULT 0,
    ADD COLUMN pass_refused     bigint NOT NULL DEFAULT 0,
    ADD COLUMN pass_full        bigint NOT NULL DEFAULT 0;
