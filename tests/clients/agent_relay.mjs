// @agent-relay/sdk 9.1.6: messaging, the inbox with its states, and its delivery runner.
// Given: RELAY_A and RELAY_B (the gateways).

import { DeliveryRunner, RelaycastMessagingClient } from '@agent-relay/sdk';
import { check, finish, refused, same, until } from './harness.mjs';

const { RELAY_A, RELAY_B } = process.env;
const MESSAGES = 100;

/** A workspace by hand: this client makes none. */
async function workspace() {
  const answer = await fetch(`${RELAY_A}/v1/workspaces`, {
    method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ name: 'agent-relay' }),
  });
  return (await answer.json()).data.api_key;
}

const workspaceKey = await workspace();
const admin = new RelaycastMessagingClient({ workspaceKey, baseUrl: RELAY_A });
const tokens = {};
for (const name of ['ada', 'bob', 'cyd']) tokens[name] = (await admin.agents.register({ name })).token;
const as = (name, baseUrl) => new RelaycastMessagingClient({ workspaceKey, agentToken: tokens[name], baseUrl });
const ada = as('ada', RELAY_A);
const bob = as('bob', RELAY_B);
const cyd = as('cyd', RELAY_B);

// Messaging.
check('a workspace is told', (await bob.workspace.info()).name === 'agent-relay');
same('agents are listed', (await ada.agents.list()).map((agent) => agent.name).sort(), ['ada', 'bob', 'cyd']);
same('one knows itself', (await bob.agents.me()).name, 'bob');
await ada.channels.create({ name: 'plans', topic: 'today' });
for (const agent of [bob, cyd]) await agent.channels.join('#plans');
same('a channel has members', (await ada.channels.members('plans')).map((member) => member.agentName).sort(), ['ada', 'bob', 'cyd']);
const posted = await ada.messages.send({ channel: '#plans', text: 'see @bob', idempotencyKey: 'first' });
same('a key counts', (await ada.messages.send({ channel: '#plans', text: 'see @bob', idempotencyKey: 'first' })).id, posted.id);
await bob.messages.reply({ messageId: posted.id, text: 'seen' });
same('a thread is read', (await ada.threads.get(posted.id)).replies.map((message) => message.text), ['seen']);
await bob.messages.react(posted.id, 'eyes');
same('reactions are read', (await cyd.messages.reactions(posted.id)).map((one) => [one.emoji, one.count]), [['eyes', 1]]);
await bob.messages.markRead(posted.id);
same('readers too', (await ada.messages.readers(posted.id)).map((one) => one.agentName), ['bob']);
same('words are found', (await bob.messages.search('seen')).map((hit) => hit.text), ['seen']);
const direct = await ada.messages.direct({ to: 'bob', text: 'a letter' });
same('a letter is read', (await bob.messages.listDirect({ conversationId: direct.conversationId })).map((message) => message.text), ['a letter']);
const group = await ada.messages.groupDirect({ participants: ['bob', 'cyd'], text: 'to both' });
same('and a group', (await cyd.messages.listDirect({ conversationId: group.conversationId })).map((message) => message.text), ['to both']);
const inbox = await bob.inbox.get();
same('what is unread', [inbox.unreadDirectMessages ?? inbox.unreadDms].flat().length, 2);
await refused('a wrong name is nobody', 'not_found', () => ada.messages.direct({ to: 'nobody', text: 'x' }));

// The mailbox without a socket: listed, acknowledged, failed, put off.
const waiting = (await cyd.inbox.list({ agentName: 'cyd' })).items;
same('the mailbox is in order', waiting.map((item) => item.message.text), ['see @bob', 'seen', 'to both']);
// This client has no word for acked.
same('one is acknowledged', (await cyd.inbox.ack({ inboxItemId: waiting[0].id })).deliveryId, waiting[0].id);
same('one fails', (await cyd.inbox.fail({ inboxItemId: waiting[1].id, error: 'no use', retry: false })).state, 'failed');
const availableAt = new Date(Date.now() + 3_600_000).toISOString();
check('one is put off', (await cyd.inbox.defer({ inboxItemId: waiting[2].id, availableAt, reason: 'busy' })).deferUntil);
same('and is left', (await cyd.inbox.list()).items.map((item) => item.message.text), ['to both']);

// The subscription, driven by delivery.accepted, while the SDK's own acknowledgements overtake it.
for (const { id } of (await bob.inbox.list()).items) await bob.inbox.ack({ inboxItemId: id });
const handled = [];
const results = [];
const runner = new DeliveryRunner({
  messaging: bob,
  agentName: 'bob',
  delivery: { receiveMessage: async (message) => (handled.push(message.text), { status: 'delivered' }) },
  onResult: (item, result) => results.push([item.state, result.status]),
  onError: (item, error) => check(`item ${item.id} is handled`, false, String(error)),
});
runner.start();
await until('the runner\'s agent is connected', async () => (await admin.agents.presence()).some((one) => one.agentName === 'bob' && one.status === 'online'));
const sent = [];
for (let nth = 1; nth <= MESSAGES; nth += 1) {
  sent.push(`item ${nth}`);
  if (nth % 2 === 0) await ada.messages.direct({ to: 'bob', text: sent.at(-1) });
  else await ada.messages.send({ channel: 'plans', text: sent.at(-1) });
}
await until(`all ${MESSAGES} items are seen`, () => handled.length >= MESSAGES, () => ({ seen: handled.length, missing: sent.filter((text) => !handled.includes(text)) }), 30);
same('each once', [...handled].sort(), [...sent].sort());
check('and reported', results.length === MESSAGES && results.every(([, status]) => status === 'delivered'), results.length);
runner.stop();
await until('nothing is left', async () => (await bob.inbox.list()).items.length === 0);

// At the same time in a burst, and with a client that had been away.
await bob.events.disconnect();
await until('the agent is offline', async () => (await admin.agents.presence()).some((one) => one.agentName === 'bob' && one.status === 'offline'));
await Promise.all(Array.from({ length: 60 }, (_, nth) => ada.messages.direct({ to: 'bob', text: `away ${nth}` })));
const again = as('bob', RELAY_A);
const stop = new AbortController();
const seen = new Set();
const reading = (async () => {
  for await (const item of again.inbox.subscribe({ agentName: 'bob', signal: stop.signal })) seen.add(item.message.text);
})();
await until('what came while it was away is seen', () => seen.size >= 60, () => seen.size);
await Promise.all(Array.from({ length: 60 }, (_, nth) => ada.messages.direct({ to: 'bob', text: `burst ${nth}` })));
await until('and a burst', () => seen.size === 120, () => seen.size);
stop.abort();
await reading;
await again.events.disconnect();
finish();
