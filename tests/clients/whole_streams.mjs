// Live events, over the workspace's stream and an agent's own socket, across the death of their gateway.

import { ask, check, report, same, until } from './harness.mjs';
import { watch, watched } from './surface.mjs';

/** Listens to everything that a client can tell, by the names of its listeners. */
export function listen(client) {
  const heard = {};
  for (const name of Object.keys(client.on)) {
    heard[name] = [];
    client.on[name]((event) => heard[name].push(event));
  }
  return heard;
}

/** Opens both streams. */
export async function open({ relay, agents: { ada, bob } }) {
  relay.connect();
  const workspace = listen(relay);
  bob.connect();
  const agent = listen(bob);
  await until('the workspace\'s stream opens', () => workspace.connected.length > 0);
  await until('and the agent\'s', () => agent.connected.length > 0);
  await until('the agent is online', async () => (await relay.agents.get('bob')).status === 'online');
  // It is online once it has registered; best-effort events reach it once its gateway serves it.
  await until('the agent hears', async () => {
    await ada.channels.leave('general');
    await ada.channels.join('general');
    return agent.memberJoined.length > 0;
  });
  return { workspace, agent };
}

/** Subscriptions by channel: which messages a handler is given. */
export async function subscriptions({ agents: { ada, bob } }) {
  const got = [];
  const subscription = bob.subscribe(['#plans', '@self'], (event) => got.push(event.message.text));
  same('a subscription knows its channels', subscription.channels, ['plans', '@self']);
  bob.subscribe(['general']);
  bob.unsubscribe(['general']);
  await ada.send('general', 'not subscribed');
  await ada.send('plans', 'subscribed');
  await ada.dm('bob', 'to himself');
  await until('it is given what it asked for', () => got.length === 2, () => got);
  same('and nothing else', got, ['subscribed', 'to himself']);
  subscription.unsubscribe();
}

/** The gateway of all connections is killed; what happens then is not lost. */
export async function survive({ relay, there, tokens, apiKey }, { workspace, agent }) {
  const lead = there.as(tokens.ada);
  const texts = (events) => events.map((event) => event.message.text).filter((text) => text.startsWith('meanwhile'));
  await ask('kill -9 the gateway');
  // Posted before the client can connect again, so that there is something to replay.
  const posts = [];
  for (let nth = 1; nth <= 10; nth += 1) {
    const text = `meanwhile ${nth}`;
    posts.push([text, (await lead.send('plans', text)).id]);
  }
  const sent = posts.map(([text]) => text);
  await until('the workspace\'s stream drops', () => workspace.disconnected.length > 0);
  await ask('let clients connect again');
  await until('the agent gets what was posted meanwhile', () => texts(agent.messageCreated).length >= 10, () => texts(agent.messageCreated));
  same('once, in order', texts(agent.messageCreated), sent);
  await until('and so does the workspace', () => texts(workspace.messageCreated).length >= 10, () => texts(workspace.messageCreated));
  // The client reads what it missed beside what is live by then, so the order of the two is its own.
  same('once too', texts(workspace.messageCreated).toSorted(), sent.toSorted());
  check('after a drop', workspace.disconnected.length > 0 && agent.disconnected.length > 0 && workspace.reconnecting[0] === 1 && agent.reconnecting[0] === 1);
  check('and what was missed was replayed', workspace.resynced.some((event) => event.replayed >= 1 && !event.gapDetected), workspace.resynced);
  await report(posts, { key: apiKey });
  await ask('start the gateway again');
  same('requests go on', (await relay.workspace.info()).id, (await there.workspace.info()).id);
}

/** Every event that there is has been told, and says what it should. */
export async function told({ relay, agents: { bob } }, { workspace, agent }, silent) {
  const names = (heard) => Object.keys(heard).filter((name) => heard[name].length > 0);
  const expected = (label, heard) => Object.keys(heard).filter((name) => !(`${label}.on.${name}` in silent));
  const late = (label, heard) => expected(label, heard).filter((name) => !names(heard).includes(name));
  await until('the workspace was told of everything', () => late('RelayCast', workspace).length === 0, () => late('RelayCast', workspace));
  await until('and so was the agent', () => late('AgentClient', agent).length === 0, () => late('AgentClient', agent));
  const someone = (events, ...values) => events.some((event) => values.every((value) => JSON.stringify(event).includes(JSON.stringify(value))));
  for (const [what, heard] of [['the workspace', workspace], ['the agent', agent]]) {
    await until(`${what} heard of a channel`, () => someone(heard.channelCreated, 'plans', 'first') && someone(heard.channelArchived, 'short-lived'));
    await until(`${what} heard of a topic`, () => someone(heard.channelUpdated, 'plans', 'second'));
    await until(`${what} heard of members`, () => someone(heard.memberJoined, 'plans', 'cyd') && someone(heard.memberLeft, 'plans', 'cyd'));
    await until(`${what} heard of silence`, () => someone(heard.channelMuted, 'plans', 'bob') && someone(heard.channelUnmuted, 'plans', 'bob'));
    await until(`${what} heard a thread`, () => someone(heard.threadReply, 'the lazy dog', 'ada'));
    await until(`${what} heard letters`, () => someone(heard.dmReceived, 'between us two') && someone(heard.groupDmReceived, 'among three'));
    await until(`${what} saw a reaction come`, () => someone(heard.messageReacted, 'tada', 'ada', 'added'));
    await until(`${what} saw a reaction go`, () => someone(heard.messageReacted, 'a/b %', 'ada', 'removed'));
    await until(`${what} heard of a file`, () => someone(heard.fileUploaded, 'plan.txt', 'ada'));
    await until(`${what} heard a webhook`, () => someone(heard.webhookReceived, 'the build is green', 'plans'));
    await until(`${what} heard who is idle`, () => someone(heard.agentStatusChanged, 'ada', 'idle'));
    await until(`${what} heard who comes and goes`, () => someone(heard.agentActive, 'cyd') && someone(heard.agentOffline, 'cyd'));
    const ids = heard.any.filter((event) => event.id && event.message).map((event) => `${event.type}:${event.id}`);
    same(`${what} heard nothing twice`, new Set(ids).size, ids.length);
  }
  check('reads are told', someone(workspace.messageRead, 'bob'));
  check('a delivery was put off and one failed', workspace.deliveryDeferred.length > 0 && workspace.deliveryFailed.length > 0);
  await bob.disconnect();
  await until('who disconnects is offline', async () => (await relay.agents.get('bob')).status === 'offline');
  relay.disconnect();
}

/** The stream of an observer token, and the socket client by itself. */
export async function sockets({ relay, there, apiKey, agents: { ada } }, front) {
  const made = await relay.observerTokens.create({ name: 'stream', scopes: ['stream:read', 'messages:read'], filters: { channelNames: ['plans'] } });
  const observer = new watched.RelayCast({ apiKey: made.token, baseUrl: front });
  observer.connect();
  const heard = listen(observer);
  const socket = watch('WsClient', new watched.WsClient({ token: apiKey, baseUrl: front, reconnectBaseDelayMs: 20 }));
  const events = [];
  const note = (event) => events.push(event.message?.text);
  socket.on('message.created', note);
  socket.connect();
  await until('both are connected', () => heard.connected.length > 0 && socket.connected);
  socket.subscribe(['plans']);
  socket.unsubscribe(['general']);
  await ada.send('general', 'hidden from the observer');
  await ada.dm('eve', 'hidden as well');
  await ada.send('plans', 'for everybody');
  await until('the observer hears its channel', () => heard.messageCreated.length > 0);
  same('and nothing else', heard.any.filter((event) => event.seq || event.message).map((event) => event.message.text), ['for everybody']);
  await until('the workspace hears all', () => events.length === 2, () => events);
  socket.reconnect();
  await until('a socket opens again', () => socket.connected);
  await ada.send('plans', 'once more');
  await until('and goes on', () => events.includes('once more'), () => events);
  socket.off('message.created', note);
  socket.disconnect();
  check('until it is told to end', !socket.connected);
  await there.observerTokens.revoke(made.id);
  await until('an observer whose token is revoked is cut', () => heard.disconnected.length > 0);
  observer.disconnect();
}

/** A server that is not there. */
export async function nowhere({ apiKey, tokens }) {
  const ws = { reconnectBaseDelayMs: 5, circuitBreakerMaxAttempts: 2 };
  const lost = watch('RelayCast', new watched.RelayCast({ apiKey, baseUrl: 'http://127.0.0.1:1', ws, retryPolicy: { maxRetries: 0 } }));
  const agent = watch('AgentClient', lost.as(tokens.ada, { ws }));
  for (const client of [lost, agent]) {
    client.connect();
    const heard = listen(client);
    await until('a client without a server gives up', () => heard.permanentlyDisconnected.length > 0);
    check('after it has said so', heard.error.length > 0 && heard.reconnecting.length === 2, heard);
  }
}
