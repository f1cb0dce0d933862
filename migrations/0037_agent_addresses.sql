-- Machine of the agent's own node, from the prefix that its registration named; null for the machine `direct`.
ALTER TABLE agents ADD COLUMN direct_machine_id text;
