-- The clock that all processes share. Statements that compare instants with the present call this function instead of
-- now(), so that tests can move time: a test replaces the function in a database of its own. It is inlined into its
-- statement, and so costs and plans as now() does.
CREATE FUNCTION relay_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS 'SELECT now()';
