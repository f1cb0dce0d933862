-- Time at which a provider's connection ended: from then on its agents are unavailable as handlers of new invocations.
-- Null while it is connected, and for connections that ended before this migration or in a process of the version
-- before: there the last heartbeat counts.
ALTER TABLE providers ADD COLUMN disconnected_at timestamptz;

-- Time at which a provider of the node last registered. Providers are removed when they deregister, and the node's name
-- stays reserved for a while. Null: never, or only with processes of the version before, whose providers have rows.
ALTER TABLE nodes ADD COLUMN last_connected_at timestamptz;
