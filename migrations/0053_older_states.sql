-- Count of the confirmations of this database by running processes. It only rises, so a lower one shows an older state of
-- the same database: a snapshot of its disk that was put back. The identity does not show that.
ALTER TABLE recovery_state ADD COLUMN confirmations bigint NOT NULL DEFAULT 0;

-- The ends of the delivery and event logs at the last confirmation: when each log was created, its last position, and when
-- that was stored. All entries up to there were committed before, so a recovery reads the later ones only.
ALTER TABLE recovery_state ADD COLUMN log_marks jsonb;
