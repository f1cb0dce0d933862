-- Part of the BEGIN of each transaction behind a pooler, which may assign another server to each: fails unless this is the
-- database that the process knows, not recovered since the process opened it, and not put back to an older state.
CREATE FUNCTION relay_require_database(expected_identity text, expected_epoch bigint, seen_confirmations bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM recovery_state
                WHERE only_row AND epoch = expected_epoch AND confirmations >= seen_confirmations)
       AND relay_database_identity() = expected_identity THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION 'this is not the database that the process knows' USING ERRCODE = 'RLEPO';
END $$;
