-- When the connection that holds the provider asked for it. A registration that waited for Postgres longer than the
-- holder's does not displace it. NULL: registered by a version that did not record it.
ALTER TABLE providers ADD COLUMN requested_at timestamptz;
