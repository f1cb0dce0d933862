-- Reactions, read state, search and statistics.

CREATE TABLE message_reactions (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    emoji               text NOT NULL,
    agent_id            bigint NOT NULL,
    reaction_id         bigint NOT NULL,
    -- Whose message it is: an inbox shows the newest reactions to its agent's messages.
    author_id           bigint NOT NULL,
    created_at          timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, message_id, emoji, agent_id),
    CONSTRAINT emoji_is_not_empty CHECK (emoji <> '')
);
CREATE INDEX message_reactions_by_author ON message_reactions (workspace_id, author_id, reaction_id);

-- As before, with what counting unread messages looks at: a thousand rows of each of many channels are then
-- read from the index alone.
DROP INDEX messages_by_channel;
CREATE INDEX messages_by_channel ON messages (workspace_id, channel_id, message_id) INCLUDE (agent_id, created_on)
    WHERE thread_id IS NULL;

-- Inboxes look for mentions. Few messages have any, so the index costs the others nothing.
CREATE INDEX messages_with_mentions ON messages (workspace_id, channel_id, message_id) WHERE mentions <> '{}';

-- Up to which seq a mailbox's acknowledged deliveries have been folded into the last-read pointers of its
-- agent. Written by the worker only; the deliveries between it and the ack floor are looked at one by one.
CREATE TABLE mailbox_reads (
    workspace_id        bigint NOT NULL,
    agent_id            bigint NOT NULL,
    folded_seq          bigint NOT NULL,
    PRIMARY KEY (workspace_id, agent_id)
) WITH (fillfactor = 60);

-- What is searched: one row per message, apart from the messages so that posting does not wait for the
-- index. Filled by the worker.
CREATE TABLE message_search (
    workspace_id        bigint NOT NULL,
    message_id          bigint NOT NULL,
    created_on          date NOT NULL,
    channel_id          bigint NOT NULL,
    -- Of a conversation, not of a channel.
    direct              boolean NOT NULL,
    -- Messages are numbered per workspace in the order of indexing; a block is 8192 of them.
    block               integer NOT NULL,
    -- The words of the text, and words that no text can contain: ' w' workspace, ' w' workspace '.' block,
    -- ' c' channel, ' n' author's name. So the one index narrows a search to its tenant and its filters.
    document            tsvector NOT NULL,
    PRIMARY KEY (workspace_id, message_id, created_on)
) PARTITION BY RANGE (created_on);
CREATE INDEX message_search_document ON message_search USING gin (document) WITH (fastupdate = on);

-- The words of a message and its marks. A text is searched up to its 32768th character, which keeps every
-- document below the limits of the index.
CREATE FUNCTION relay_search_document(workspace_id bigint, block bigint, channel_id bigint, agent_name text, words text)
RETURNS tsvector LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT to_tsvector('simple'::regconfig, left(words, 32768))
           || array_to_tsvector(ARRAY[' w' || workspace_id, ' w' || workspace_id || '.' || block,
                                      ' c' || channel_id, ' n' || agent_name])
$$;

-- How far the index reaches. All messages up to settled_id are in it; of those up to reached_id the ones
-- that were visible when it got there.
CREATE TABLE search_progress (
    workspace_id        bigint PRIMARY KEY,
    reached_id          bigint NOT NULL DEFAULT 0,
    settled_id          bigint NOT NULL DEFAULT 0,
    -- Messages in the index, dropped ones included.
    indexed_count       bigint NOT NULL DEFAULT 0,
    CONSTRAINT what_is_settled_was_reached CHECK (settled_id <= reached_id)
) WITH (fillfactor = 60);

-- What was posted, per author and day (UTC). Counted when a message is indexed.
CREATE TABLE message_stats (
    workspace_id        bigint NOT NULL,
    created_on          date NOT NULL,
    agent_id            bigint NOT NULL,
    channel_messages    bigint NOT NULL,
    direct_messages     bigint NOT NULL,
    attachment_count    bigint NOT NULL,
    mention_count       bigint NOT NULL,
    -- Numbers that authors put into their messages' metadata: latency_ms, cost_usd and tokens.
    latency_count       bigint NOT NULL,
    latency_sum_ms      double precision NOT NULL,
    latency_max_ms      double precision,
    cost_usd            double precision NOT NULL,
    prompt_tokens       double precision NOT NULL,
    completion_tokens   double precision NOT NULL,
    total_tokens        double precision NOT NULL,
    last_message_at     timestamptz NOT NULL,
    PRIMARY KEY (workspace_id, created_on, agent_id)
) WITH (fillfactor = 60);

-- A number that an author put into a message's metadata, or into the object `usage` in it, under either of
-- two names; none if it is no number. Cut to a range that sums of it cannot leave.
CREATE FUNCTION relay_metric(metadata json, name text, other text) RETURNS double precision LANGUAGE sql
IMMUTABLE PARALLEL SAFE AS $$
    SELECT least(greatest(value::text::numeric, 0), 1e12)::double precision
      FROM unnest(ARRAY[metadata -> name, metadata -> other,
                        metadata -> 'usage' -> name, metadata -> 'usage' -> other]) WITH ORDINALITY AS v (value, nth)
     WHERE json_typeof(value) = 'number'
     ORDER BY nth LIMIT 1
$$;

-- As before, for every table that is partitioned by its rows' day.
CREATE OR REPLACE FUNCTION relay_ensure_partitions(days_ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    day date;
    child text;
    made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('relay_partitions'));
    FOR parent IN
        SELECT c.relname FROM pg_partitioned_table p
          JOIN pg_class c ON c.oid = p.partrelid AND c.relnamespace = current_schema()::regnamespace
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
         WHERE p.partstrat = 'r' AND a.attname = 'created_on'
         ORDER BY c.relname
    LOOP
        FOR day IN SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, days_ahead) AS n LOOP
            child := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass(child) IS NULL THEN
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', child, parent);
                EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                               parent, child, day, day + 1);
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
SELECT relay_ensure_partitions(7);

-- Messages that are there already are indexed too: each of their days needs its partition.
DO $$
DECLARE
    child text;
    day date;
BEGIN
    FOR child IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'messages'::regclass AND c.relname ~ '^messages_[0-9]{8}$'
    LOOP
        day := to_date(right(child, 8), 'YYYYMMDD');
        EXECUTE format('CREATE TABLE IF NOT EXISTS %I PARTITION OF message_search FOR VALUES FROM (%L) TO (%L)',
                       'message_search_' || right(child, 8), day, day + 1);
    END LOOP;
END $$;
