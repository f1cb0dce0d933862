// @relaycast/sdk 6.0.2: the main flow, ada at one gateway and bob at the other.
// Given: RELAY_A and RELAY_B (the gateways), RELAY_FLAKY (gateway A, behind a proxy that the test controls).

import { RelayCast } from '@relaycast/sdk';
import { ask, check, finish, live, refused, same, until } from './harness.mjs';

const { RELAY_A, RELAY_B, RELAY_FLAKY } = process.env;
const name = `sdk-js-${process.pid}-${Date.now()}`;

const workspace = await RelayCast.createWorkspace(name, { baseUrl: RELAY_A });
check('a workspace is created', workspace.apiKey.startsWith('rk_live_') && workspace.workspaceId, workspace);
const atA = new RelayCast({ apiKey: workspace.apiKey, baseUrl: RELAY_A });
const atB = new RelayCast({ apiKey: workspace.apiKey, baseUrl: RELAY_B });
same('its key finds it at the other gateway', (await atB.workspace.info()).name, name);

// Agents.
const registered = {};
for (const agent of ['ada', 'bob', 'cyd']) {
  registered[agent] = await atA.agents.register({ name: agent, type: 'agent', persona: `${agent} of the test` });
  check(`${agent} is registered`, registered[agent].token.startsWith('at_live_'), registered[agent]);
}
await refused('a name is taken once', 'name_conflict', () => atB.agents.register({ name: 'ada' }));
const rotated = await atB.registerOrRotate({ name: 'cyd' });
same('registerOrRotate keeps the agent', rotated.id, registered.cyd.id);
check('registerOrRotate gives a new token', rotated.token !== registered.cyd.token);
await refused('the old token is dead', 'agent_token_invalid', () => atA.as(registered.cyd.token).me())
  .then((error) => same('with a status of 401', error.statusCode, 401));
const fresh = await atB.registerOrRotate({ name: 'dora' });
check('registerOrRotate registers a new name', fresh.id && fresh.token.startsWith('at_live_'), fresh);
same('agents are listed', (await atA.agents.list()).map((a) => a.name).sort(), ['ada', 'bob', 'cyd', 'dora']);
same('an agent is found by name', (await atB.agents.get('ada')).id, registered.ada.id);
await refused('nobody is found by a wrong name', 'not_found', () => atA.agents.get('nobody'));
const updated = await atA.agents.update('ada', { metadata: { team: 'blue' } });
same('an agent is updated', updated.metadata, { team: 'blue' });

const ada = atA.as(registered.ada.token);
const bob = atB.as(registered.bob.token);
const cyd = atA.as(rotated.token);
same('an agent knows itself', (await ada.me()).name, 'ada');

// Channels.
const channel = await ada.channels.create({ name: 'plans', topic: 'what to do' });
same('a channel is created', [channel.name, channel.topic], ['plans', 'what to do']);
await bob.channels.join('plans');
check('channels are listed', (await bob.channels.list()).some((c) => c.name === 'plans'));
same('members are listed', (await ada.channels.members('plans')).map((m) => m.agentName).sort(), ['ada', 'bob']);
await ada.channels.invite('plans', 'cyd');
same('an invited agent is a member', (await cyd.channels.get('plans')).members.length, 3);
same('a topic is set', (await ada.channels.setTopic('plans', 'today')).topic, 'today');
await refused('a channel is created once', 'name_conflict', () => bob.channels.create({ name: 'plans' }));

// Live, from one gateway to the other.
const { events: got } = await live(bob);
const posted = await ada.send('#plans', 'first', { attachments: [] });
same('a post is answered', [posted.text, posted.agentName], ['first', 'ada']);
await ada.send('plans', 'second @bob');
const reply = await ada.reply(posted.id, 'in a thread');
same('a reply is answered', reply.text, 'in a thread');
const dm = await ada.dm('bob', 'between us');
check('a direct message is answered', dm.conversationId && dm.message.text === 'between us', dm);
const group = await ada.dms.createGroup({ participants: ['bob', 'cyd'], name: 'three' });
check('a group is answered', typeof (group.id ?? group.conversationId) === 'string', group);
const groupId = group.conversationId ?? group.id;
const toGroup = await ada.dms.sendMessage(groupId, 'among three');
check('a group message is answered', toGroup, toGroup);
await until('bob receives all five live', () => got.length >= 5, () => got);
same('in order, once each', got, [
  ['message.created', 'first', 'ada'],
  ['message.created', 'second @bob', 'ada'],
  ['thread.reply', 'in a thread', 'ada'],
  ['dm.received', 'between us', 'ada'],
  ['group_dm.received', 'among three', 'ada'],
]);
await cyd.send('plans', 'steered', { mode: 'steer' });
await until('and what another agent posts', () => got.length === 6, () => got);

// Reading back.
same('messages are listed, oldest last', (await bob.messages('plans')).map((m) => m.text).sort(),
  ['first', 'second @bob', 'steered']);
same('a message is read by id', (await bob.message(posted.id)).text, 'first');
const thread = await bob.thread(posted.id);
same('a thread is read', [thread.parent.text, thread.replies.map((m) => m.text)], ['first', ['in a thread']]);
same('a conversation is read', (await bob.dms.messages(dm.conversationId)).map((m) => m.text), ['between us']);
same('conversations are listed', (await bob.dms.conversations()).length, 2);
const receipt = await bob.markRead(posted.id);
same('a message is marked read', [receipt.messageId, receipt.agentId], [posted.id, registered.bob.id]);
await until('all of bob\'s deliveries are acked', async () => (await bob.deliveries()).length === 0,
  () => got);
check('presence shows bob online', (await atA.agents.presence()).some((p) => p.agentName === 'bob' && p.status === 'online'));

// Idempotency: the same key, and a retry of the client's own after a lost answer.
const key = { idempotencyKey: `key-${name}` };
const once = await ada.send('plans', 'only once', key);
const twice = await ada.send('plans', 'only once', key);
same('the same key is one message', twice.id, once.id);
await refused('another text under the key is refused', 'name_conflict', () => ada.send('plans', 'other', key));
const flaky = new RelayCast({ apiKey: workspace.apiKey, baseUrl: RELAY_FLAKY, retryPolicy: { backoffMs: 50 } })
  .as(registered.ada.token);
for (const [what, send] of [
  ['a post', () => flaky.send('plans', 'lost answer')],
  ['a direct message', () => flaky.dm('bob', 'lost answer')],
]) {
  await ask('lose the next 201');
  check(`${what} whose answer is lost is retried`, await send());
}
await until('bob receives the three', () => got.length === 9, () => got);
same('once each', got.slice(6).map((event) => event[1]), ['only once', 'lost answer', 'lost answer']);
same('each is listed once', (await bob.messages('plans')).filter((m) => /only once|lost answer/.test(m.text)).length, 2);

await bob.disconnect();
await until('a client that disconnects is offline', async () => (await atA.agents.get('bob')).status === 'offline');
finish();
