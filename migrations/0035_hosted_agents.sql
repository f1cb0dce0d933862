-- Node that last named the agent as running there, in a registration or an inventory; null once it has ended. Processes of
-- the version before leave it as it is: the next inventory corrects it.
ALTER TABLE agents ADD COLUMN hosted_on text;
