// Files, webhooks, subscriptions, observer tokens, session events, presence, nodes, statistics.

import { check, refused, same, until } from './harness.mjs';
import { watch, watched } from './surface.mjs';

const shown = (rows, ...keys) => rows.map((row) => keys.map((key) => row[key]));

export async function files({ agents: { ada, bob, cyd }, ids }) {
  const bytes = new TextEncoder().encode('what the file holds\n');
  const request = { filename: 'plan.txt', contentType: 'text/plain', sizeBytes: bytes.length };
  const upload = await ada.files.upload(request);
  check('an upload has an address and an end', new Date(upload.expiresAt) > new Date() && upload.uploadUrl.startsWith('http'), upload);
  await refused('it is not complete before it is uploaded', 'name_conflict', () => ada.files.complete(upload.id));
  const put = await fetch(upload.uploadUrl, { method: 'PUT', body: bytes, headers: { 'Content-Type': 'text/plain' } });
  check('the bytes are taken', put.ok, put.status);
  const file = await ada.files.complete(upload.id);
  same('then it is', [file.filename, file.contentType, file.sizeBytes], ['plan.txt', 'text/plain', bytes.length]);
  const info = await bob.files.get(file.id);
  same('others see it', [info.filename, info.uploadedBy, info.status], ['plan.txt', 'ada', 'complete']);
  same('and get the same bytes', await (await fetch(info.downloadUrl)).text(), 'what the file holds\n');
  const posted = await ada.send('plans', 'see the file', { attachments: [file.id] });
  same('it is attached', shown(posted.attachments, 'fileId', 'filename', 'sizeBytes'), [[file.id, 'plan.txt', bytes.length]]);
  same('to be seen', (await cyd.message(posted.id)).hasAttachments, true);
  same('files are listed', shown(await bob.files.list({ uploadedBy: ids.ada, limit: 5 }), 'id'), [[file.id]]);
  same('by who uploaded them', await bob.files.list({ uploadedBy: ids.bob }), []);
  await refused('only its owner deletes one', 'unauthorized', () => bob.files.delete(file.id));
  await ada.files.delete(file.id);
  same('then it is gone', (await bob.files.list()).filter((one) => one.id === file.id), []);
}

export async function hooks({ relay, there, agents: { bob } }) {
  const hook = await relay.webhooks.create({ name: 'builds', channel: 'plans' });
  const second = await there.webhooks.createInbound({ channel: 'plans' });
  same('webhooks are listed', shown(await there.webhooks.list(), 'id').sort(), [[hook.webhookId], [second.webhookId]].sort());
  const answer = await there.webhooks.trigger(hook.webhookId, { text: 'the build is green', author: 'ci' }, hook.token);
  same('one that is called posts', [answer.channel, answer.text, answer.author], ['plans', 'the build is green', 'ci']);
  const [newest] = await bob.messages('plans', { limit: 1 });
  same('into its channel', [newest.id, newest.text, newest.agentName], [answer.messageId, 'the build is green', 'ci']);
  await refused('not with another\'s token', 'unauthorized', () => relay.webhooks.trigger(hook.webhookId, { text: 'x' }, second.token));
  await relay.webhooks.delete(hook.webhookId);
  await refused('nor when it is deleted', 'unauthorized', () => relay.webhooks.trigger(hook.webhookId, { text: 'x' }, hook.token));
  same('the other one is left', shown(await relay.webhooks.list(), 'id'), [[second.webhookId]]);

  const wanted = { events: ['message.created', 'dm.received'], filter: { channel: 'plans' }, url: 'https://127.0.0.1:9/in', headers: { 'X-Own': 'secret' }, secret: 'a secret' };
  const subscription = await relay.subscriptions.create(wanted);
  same('a subscription is kept', [subscription.events, subscription.filter, subscription.url, subscription.isActive], [wanted.events, wanted.filter, wanted.url, true]);
  check('without its secrets', !JSON.stringify(subscription).includes('secret'), subscription);
  same('it is read', (await there.subscriptions.get(subscription.id)).url, wanted.url);
  same('and listed', shown(await there.subscriptions.list(), 'id'), [[subscription.id]]);
  await there.subscriptions.delete(subscription.id);
  await refused('until it is deleted', 'not_found', () => relay.subscriptions.get(subscription.id));
}

export async function observerTokens({ relay, there }, front) {
  const made = await relay.observerTokens.create({ name: 'board', scopes: ['stream:read', 'messages:read'], filters: { channelNames: ['plans'] } });
  check('an observer token is made', made.token.startsWith('ot_live_'), made);
  const observer = watch('RelayCast', new watched.RelayCast({ apiKey: made.token, baseUrl: front, ws: { reconnectBaseDelayMs: 50 } }));
  check('it reads what it may', (await observer.messages.list('plans', { limit: 1 })).length === 1);
  await refused('nothing hidden', 'not_found', () => observer.messages.list('general'));
  await refused('nor what its scopes lack', 'unauthorized', () => observer.activity());
  await refused('and writes nothing', 'unauthorized', () => observer.systemPrompt.set({ prompt: 'x' }));
  await refused('a name is used once', 'name_conflict', () => there.observerTokens.create({ name: 'board', scopes: ['stream:read'] }));
  const changed = await there.observerTokens.update(made.id, { description: 'on the wall', scopes: ['stream:read', 'messages:read', 'activity:read'] });
  same('it is changed', [changed.description, changed.scopes.length], ['on the wall', 3]);
  await until('which counts at once', () => observer.activity().then(() => true, () => false));
  same('it is read', [(await relay.observerTokens.get(made.id)).description, (await relay.observerTokens.get(made.id)).token], ['on the wall', undefined]);
  same('and listed', shown(await there.observerTokens.list(), 'id', 'status'), [[made.id, 'active']]);
  const rotated = await there.observerTokens.rotate(made.id);
  // A gateway hears of another one's changes within milliseconds.
  const dead = (client) => client.messages.list('plans').then(() => false, (error) => error.code === 'unauthorized');
  await until('rotated, the old one is dead', () => dead(observer));
  const again = new watched.RelayCast({ apiKey: rotated.token, baseUrl: front });
  check('and the new one lives', (await again.messages.list('plans', { limit: 1 })).length === 1);
  await relay.observerTokens.revoke(made.id);
  await until('until it is revoked', () => dead(again));
  same('of which a trace is left', shown((await relay.observerTokens.list()).filter((one) => one.id === made.id), 'status').flat().filter((status) => status !== 'revoked'), []);
}

export async function sessions({ relay, there, agents: { ada, cyd }, ids }) {
  const first = await relay.agents.events.emit('ada', { type: 'tool.called', payload: { tool: 'grep' } });
  const second = await there.agents.events.emit('ada', { type: 'status.blocked' });
  same('session events are numbered', [first.sequence, second.sequence, first.agentId], [1, 2, ids.ada]);
  same('newest first', shown(await there.agents.events.list('ada', { limit: 10 }), 'type'), [['status.blocked'], ['tool.called']]);
  same('by type', shown(await relay.agents.events.list('ada', { type: 'tool.called' }), 'id'), [[first.id]]);
  await relay.agents.events.emit('ada', { type: 'status.changed', payload: { status: 'idle' } });

  const status = async (name) => (await there.agents.presence()).find((one) => one.agentName === name).status;
  for (const [online, offline] of [['markOnline', 'markOffline'], ['heartbeat', 'markOffline']]) {
    await cyd.presence[online]();
    await until('an agent that says so is online', async () => (await status('cyd')) === 'online');
    await cyd.presence[offline]();
    await until('and offline', async () => (await status('cyd')) === 'offline');
  }
  await cyd.heartbeat();
  await until('by a heartbeat of its own too', async () => (await status('cyd')) === 'online');
  same('as the list says', (await relay.agents.list({ status: 'online' })).some((agent) => agent.name === 'cyd'), true);
}

export async function nodes({ relay, there, agents: { ada } }, other) {
  const node = await relay.nodes.create({ name: 'mill', capabilities: ['grind'], maxAgents: 4, tags: ['stone'] });
  same('a node is made', [node.name, node.kind, node.status, node.token.startsWith('nt_live_')], ['mill', 'ws', 'offline', true]);
  const binding = await there.nodes.bindAgent('mill', { agentName: 'dora' });
  same('an agent is bound to it', [binding.agentName, binding.nodeName], ['dora', 'mill']);
  same('which is told', shown(await relay.nodes.listAgents('mill'), 'agentName'), [['dora']]);

  const provider = watch('NodeProviderClient', new watched.NodeProviderClient({
    baseUrl: other, nodeToken: node.token, nodeId: node.id, nodeName: 'mill', provider: { name: 'miller' }, heartbeatIntervalMs: 200,
  }));
  provider.capability('sift', (input) => input);
  const serving = provider.serve();
  const registration = await provider.whenRegistered();
  same('a provider registers what it can do', registration.acceptedCapabilities?.map((one) => one.name) ?? registration.accepted_capabilities.map((one) => one.name), ['sift']);
  check('and is connected', provider.connected);
  await until('the node is live', async () => (await relay.nodes.get('mill')).live);
  same('and found by what it can do', shown(await there.nodes.list({ capability: 'sift' }), 'name'), [['mill']]);
  same('and by name', shown(await there.nodes.list({ name: 'mill' }), 'name'), [['mill']]);
  await provider.stop();
  await serving;
  await until('until it leaves', async () => !(await there.nodes.get('mill')).live);
  await relay.nodes.unbindAgent('mill', 'dora');
  same('an agent is bound no more', await relay.nodes.listAgents('mill'), []);
}

/** Actions: an agent's own, and a provider's; the outcome comes to the caller's socket. */
export async function actions({ relay, there, agents: { ada, bob, cyd } }, { agent }, other) {
  const schema = { type: 'object', required: ['n'], properties: { n: { type: 'integer' } } };
  const made = await relay.actions.register({ name: 'double', description: 'twice', handlerAgent: 'bob', inputSchema: schema });
  same('an action is registered', [made.name, made.handlerAgent, made.handlerNode, made.isActive], ['double', 'bob', null, true]);
  same('listed', shown(await there.actions.list(), 'name'), [['double']]);
  same('and shown', (await there.actions.get('double')).inputSchema, schema);
  await refused('what it takes is checked', 'transport_error', () => bob.actions.invoke('double', { n: 'two' }));
  const asked = await bob.actions.invoke('double', { n: 2 });
  same('it is invoked', [asked.actionName, asked.status, asked.input], ['double', 'invoked', { n: 2 }]);
  await until('its handler is asked', () => agent.actionInvoked.some((event) => event.invocationId === asked.invocationId), () => agent.actionInvoked);
  const done = await bob.actions.completeInvocation('double', asked.invocationId, { output: { twice: 4 }, durationMs: 3 });
  same('and answers', [done.status, done.output, done.durationMs], ['completed', { twice: 4 }, 3]);
  await until('which the caller is told', () => agent.actionCompleted.some((event) => event.invocationId === asked.invocationId), () => agent.actionCompleted);
  const failing = await bob.actions.invoke('double', { n: 3 });
  await bob.actions.completeInvocation('double', failing.invocationId, { error: 'too odd' });
  await until('as it is told of a failure', () => agent.actionFailed.some((event) => event.invocationId === failing.invocationId && event.error === 'too odd'), () => agent.actionFailed);
  await relay.actions.register({ name: 'private', description: 'not for bob', handlerAgent: 'ada', availableTo: ['cyd'] });
  await refused('not everybody may', 'unauthorized', () => bob.actions.invoke('private', {}));
  await until('which is told too', () => agent.actionDenied.some((event) => event.actionName === 'private'), () => agent.actionDenied);
  await cyd.actions.invoke('private', {});

  const node = await relay.nodes.create({ name: 'press', capabilities: ['squeeze'] });
  const provider = watch('NodeProviderClient', new watched.NodeProviderClient({
    baseUrl: other, nodeToken: node.token, nodeId: node.id, nodeName: 'press', provider: { name: 'presser' },
  }));
  provider.capability('squeeze', { global: true }, (input) => ({ juice: input.fruit }));
  provider.capability('burst', { global: true }, () => { throw new Error('it burst'); });
  const serving = provider.serve();
  await provider.whenRegistered();
  const outcome = async (name, input) => {
    const { invocationId } = await ada.actions.invoke(name, input);
    let invocation;
    await until(`${name} has an outcome`, async () => {
      invocation = await ada.actions.getInvocation(name, invocationId);
      return invocation.completedAt !== null;
    }, () => invocation);
    return [invocation.status, invocation.output, invocation.error];
  };
  same('a provider does what an agent asks for', await outcome('squeeze', { fruit: 'apple' }), ['completed', { juice: 'apple' }, null]);
  same('or tells why not', await outcome('burst', {}), ['failed', null, 'it burst']);
  await provider.stop();
  await serving;
  // The provider says that it goes and does not wait for an answer.
  let refusal;
  await until('nobody else can', () => ada.actions.invoke('squeeze', {}).then(() => false, (error) => { refusal = error; return error.code === 'not_found'; }), () => refusal);
  const trigger = await relay.triggers.create({ pattern: 'twice', actionName: 'double' });
  same('a trigger is listed', shown(await there.triggers.list(), 'id'), [[trigger.id]]);
  same('and shown', (await there.triggers.get(trigger.id)).actionName, 'double');
  same('it is changed', (await relay.triggers.update(trigger.id, { enabled: false })).enabled, false);
  same('a mention may be a boolean', (await relay.triggers.update(trigger.id, { mention: true })).mention, true);
  await relay.triggers.delete(trigger.id);
  await refused('and is gone when deleted', 'not_found', () => there.triggers.get(trigger.id));
  same('who has no machine is released at once', (await relay.agents.release({ name: 'dora' })).status, 'completed');
  await relay.actions.delete('double');
  await there.actions.delete('private');
  same('an action is gone', await relay.actions.list(), []);
}

export async function figures({ relay, there, ids }, { dm }) {
  const recent = await relay.activity(100);
  check('activity shows messages and letters', ['message', 'dm'].every((type) => recent.some((item) => item.type === type)), recent.slice(0, 3));
  same('as many as asked for', (await there.activity(2)).length, 2);
  same('newest first', recent.map((item) => item.createdAt), recent.map((item) => item.createdAt).sort().reverse());
  const letters = await there.console.messages({ conversationId: dm.conversationId, deliveryKind: 'dm', limit: 10 });
  same('the console shows a conversation', shown(letters, 'text', 'agentName'), [['to himself', 'ada'], ['and again', 'ada'], ['between us two', 'ada']]);
  same('in pages', shown(await relay.console.messages({ before: letters[1].id, conversationId: dm.conversationId }), 'text'), [['between us two']]);
  check('and an agent\'s', (await relay.console.messages({ agentId: ids.bob })).every((one) => one.agentName === 'bob'));
  const stats = await there.console.stats({ days: 2 });
  same('figures add up', [stats.windowDays, stats.channelMessages + stats.dmMessages], [2, stats.totalMessages]);
  const agents = await relay.console.agents({ days: 1, limit: 2 });
  check('the busiest come first', agents[0].agentName === 'ada' && agents.length === 2 && agents[0].messageCount >= agents[1].messageCount, agents);
  same('costs are counted', Object.keys((await relay.console.costs({ days: 1 })).totals).sort(), ['completionTokens', 'promptTokens', 'totalCostUsd', 'totalTokens']);
}
