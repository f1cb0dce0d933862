// The ways into a workspace: RelaycastSetup, WorkspaceHandle, the static methods, and identities.

import { check, refused, same, until } from './harness.mjs';
import { watch, watched } from './surface.mjs';

export async function setups(front, other) {
  const { RelayCast } = watched;
  const name = `whole-setup-${process.pid}-${Date.now()}`;
  const setup = watch('RelaycastSetup', new watched.RelaycastSetup({ baseUrl: front }));
  const handle = watch('WorkspaceHandle', await setup.createWorkspace({ name }));
  check('the setup makes a workspace', handle.info.workspaceId && handle.getApiKey().startsWith('rk_live_'), handle.info);
  same('which is found by its name', (await setup.lookupWorkspace(name)).id, handle.info.workspaceId);
  same('a wrong name is nobody', await setup.lookupWorkspace(`${name}-not`), null);
  same('statically as well', (await RelayCast.lookupWorkspace(name, { baseUrl: other })).id, handle.info.workspaceId);
  same('and nobody there', await RelayCast.lookupWorkspace(`${name}-not`, { baseUrl: other }), null);
  const ensured = await RelayCast.ensureWorkspace(name, { baseUrl: other, apiKey: handle.getApiKey() });
  same('its owner gets the same one again', [ensured.existed, ensured.workspaceId], [true, handle.info.workspaceId]);
  const twin = await RelayCast.createWorkspace(name, { baseUrl: other });
  check('anybody else gets another one of that name', twin.workspaceId !== handle.info.workspaceId);

  const record = await handle.registerAgent({ name: 'ada' });
  same('an agent is registered', [record.name, record.status], ['ada', 'online']);
  same('its token is kept', handle.getAgentToken('ada'), record.token);
  same('and the agent listed', handle.listRegisteredAgents().map((agent) => agent.name), ['ada']);
  const bob = handle.as((await handle.registerAgent({ name: 'bob' })).token);
  const ada = watch('Relay', handle.relay('ada'));
  const got = [];
  const stop = ada.onMessage((message) => got.push([message.sender, message.channel ?? 'dm', message.text, message.threadId !== null]));
  await until('ada is connected', async () => (await handle.relayCast().agents.get('ada')).status === 'online');
  const first = await bob.send('general', 'to all');
  await bob.reply(first.id, 'in its thread');
  await bob.dm('ada', 'to ada');
  await until('the simple client receives it all', () => got.length === 3, () => got);
  same('as it was sent', got, [['bob', 'general', 'to all', false], ['bob', 'general', 'in its thread', true], ['bob', 'dm', 'to ada', false]]);
  stop();
  const own = await ada.post('general', 'from ada');
  await ada.reply(own.id, 'and a reply');
  await ada.send('bob', 'to bob');
  const inbox = await handle.relay('bob').inbox();
  same('bob has it unread', inbox.unreadDms.map((dm) => [dm.from, dm.unreadCount, dm.lastMessage.text]), [['ada', 1, 'to bob']]);
  await until('what ada was handed is read', async () => (await ada.inbox()).unreadDms.length === 0);
  await handle.relay('ada').agents.disconnect();
  const joined = watch('WorkspaceHandle', await setup.joinWorkspace(handle.info.workspaceId, handle.getApiKey()));
  same('with its key one is in it again', (await joined.relayCast().agents.list()).length, 2);
  await watch('RelayCast', joined.relayCast()).workspace.delete();
  await refused('a deleted workspace knows its key no more', 'unauthorized', () => handle.relayCast().agents.list());
}

/** Names, tokens and who is who. Returns the clients that the other parts use. */
export async function identities(front, other) {
  const made = await watched.RelayCast.createWorkspace(`whole-${process.pid}-${Date.now()}`, { baseUrl: other });
  const options = { apiKey: made.apiKey, ws: { reconnectBaseDelayMs: 50 } };
  const relay = watch('RelayCast', new watched.RelayCast({ ...options, baseUrl: front }));
  const there = watch('RelayCast', new watched.RelayCast({ ...options, baseUrl: other }));
  await refused('nobody is known yet', 'not_found', () => relay.resolveIdentity());
  const tokens = {};
  for (const [name, register] of [
    ['ada', () => relay.agents.register({ name: 'ada', metadata: { team: 'blue' } })],
    ['bob', () => there.agent({ name: 'bob' })],
    ['cyd', () => there.human({ name: 'cyd' })],
    ['dora', () => relay.system({ name: 'dora' })],
    ['eve', () => relay.agents.registerAgent({ name: 'eve' })],
  ]) tokens[name] = (await register()).token;
  const all = await there.agents.list();
  same('each is of its type', all.map((agent) => [agent.name, agent.type]).sort(),
    [['ada', 'agent'], ['bob', 'agent'], ['cyd', 'human'], ['dora', 'system'], ['eve', 'agent']]);
  same('the last one registered is remembered', await relay.resolveIdentity(),
    { agentId: all.find((agent) => agent.name === 'eve').id, name: 'eve', workspaceId: made.workspaceId });
  same('in both ways', (await relay.agents.resolveIdentity()).name, 'eve');
  const second = await relay.registerAgent({ name: 'eve' });
  check('a taken name gets a suffix', second.name.startsWith('eve-'), second.name);
  await there.agents.delete(second.name);
  await refused('and is gone when deleted', 'not_found', () => relay.agents.get(second.name));
  await refused('a strict name is taken once', 'name_conflict', () => there.agents.registerAgent({ name: 'eve', strict: true }));
  for (const register of [(data) => there.registerOrRotate(data), (data) => relay.agents.registerOrRotate(data), (data) => there.agents.registerOrGet(data)]) {
    const again = await register({ name: 'eve' });
    await refused('the token of before is dead', 'agent_token_invalid', () => relay.as(tokens.eve).me());
    tokens.eve = again.token;
  }
  const rotated = await there.agents.rotateToken('eve');
  await refused('and after a rotation', 'agent_token_invalid', () => relay.as(tokens.eve).me());
  same('which gives one that works', (await relay.agents.me(rotated.token)).name, 'eve');
  tokens.eve = rotated.token;
  same('a client is made again of a token', (await (await there.reconnect({ apiToken: tokens.eve })).me()).name, 'eve');
  same('in both ways', (await (await there.workspace.reconnect({ apiToken: tokens.eve })).me()).name, 'eve');
  const updated = await there.agents.update('ada', { persona: 'careful', metadata: { room: 7 } });
  same('an update merges', [updated.persona, updated.metadata.team, updated.metadata.room], ['careful', 'blue', 7]);
  same('agents are listed by status', [(await relay.agents.list({ status: 'online' })).length, (await there.agents.list({ status: 'offline' })).length], [5, 0]);
  const as = (client, name) => watch('AgentClient', client.as(tokens[name], { ws: { reconnectBaseDelayMs: 50 } }));
  const agents = { ada: as(relay, 'ada'), bob: as(relay, 'bob'), cyd: as(there, 'cyd'), dora: as(there, 'dora'), eve: as(there, 'eve') };
  same('an agent knows itself', (await agents.ada.me()).id, all.find((agent) => agent.name === 'ada').id);
  return { relay, there, agents, tokens, apiKey: made.apiKey, workspaceId: made.workspaceId, ids: Object.fromEntries(all.map((agent) => [agent.name, agent.id])) };
}

/** What touches no engine, or a server of our own that answers badly. */
export async function helpers({ apiKey }, other) {
  const http = watch('HttpClient', new watched.HttpClient({ apiKey, baseUrl: other, originActor: 'Test/Agent', agentRelayDistinctId: 'd-1' }));
  same('a client knows what it was given', [http.apiKey, http.baseUrl, http.originActor, http.agentRelayDistinctId],
    [apiKey, other, 'test/agent', 'd-1']);
  same('and what it is', [http.originClient, http.originVersion, http.retryPolicy.maxRetries], ['@relaycast/sdk', '6.0.2', 3]);
  const { id } = await http.get('/v1/workspace');
  same('it asks for anything', (await http.request('GET', '/v1/workspace')).id, id);
  const channel = await http.post('/v1/channels', { name: 'by-hand' });
  same('writes', (await http.patch(`/v1/channels/${channel.name}`, { topic: 'changed' })).topic, 'changed');
  same('puts', (await http.put('/v1/workspace/system-prompt', { prompt: 'be kind' })).prompt, 'be kind');
  await http.delete(`/v1/channels/${channel.name}`);
  check('deletes', !(await http.get('/v1/channels')).some((one) => one.name === channel.name));
  await refused('and carries another key', 'agent_token_invalid', () => http.withApiKey(`at_live_${'0'.repeat(32)}`).get('/v1/agent'));

  const conflict = watched.relayErrorFromApi('agent_already_exists', 'taken', 409);
  check('errors are named', watched.isNameConflictError(conflict) && conflict.statusCode === 409, conflict);
  same('codes are the client\'s own', watched.normalizeRelayErrorCode('agent_not_found', 404), 'not_found');
  same('and say whether to try again', watched.relayErrorRetryable('rate_limited', 429), true);
  check('names get suffixes', /^ada-[0-9a-f]+$/.test(watched.appendLegacySuffix('ada')));
  same('actors are cleaned', watched.sanitizeOriginActor('Codex'), 'codex');
  same('so are ids', watched.sanitizeAgentRelayDistinctId('not an id'), undefined);

}
