-- The W3C trace context (traceparent) of what came of a traced request, for the calls that workers make of it. Null for
-- all others.

ALTER TABLE messages ADD COLUMN traceparent text;

ALTER TABLE subscription_deliveries ADD COLUMN traceparent text;
