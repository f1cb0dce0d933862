-- Until then messages of the workspace are put into the search index before those of others: it has searched, or has read
-- its statistics. All others are indexed at low priority.
ALTER TABLE search_progress ADD COLUMN wanted_until timestamptz NOT NULL DEFAULT '-infinity';
CREATE INDEX search_progress_wanted ON search_progress (workspace_id) WHERE wanted_until > '-infinity';
