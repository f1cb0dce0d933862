-- Number of the last recovery: milliseconds since 1970 when it began, so that no two recoveries have the same, in
-- whatever copy of the database they happen. 0 before the first.
ALTER TABLE recovery_state ADD COLUMN epoch bigint NOT NULL DEFAULT 0;

-- Part of statements that assign numbers or move cursors. A process that opened under another epoch does not know what
-- the recovery changed, so its transaction fails. NULL: the caller is a tool that serves no client.
CREATE FUNCTION relay_require_epoch(expected bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF expected IS NULL OR EXISTS (SELECT FROM recovery_state WHERE only_row AND epoch = expected) THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'the database was recovered after this process had opened it' USING ERRCODE = 'RLEPO';
END $$;
