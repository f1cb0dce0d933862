// @agent-relay/sdk 9.1.6: a live client whose database fails over gets everything, in order, once.
// Given: RELAY_FRONT and RELAY_OTHER (two gateways), RELAY_KEY (a workspace's key).
// With RELAY_STANDBY_LAGS, everything after the joining is missing on the standby of the database. With RELAY_REFUSED,
// the client's upgrades are refused instead, until the test is asked to let it connect.

import { RelaycastMessagingClient } from '@agent-relay/sdk';
import { ask, check, finish, report, same, until } from './harness.mjs';

const { RELAY_FRONT, RELAY_OTHER, RELAY_KEY: workspaceKey } = process.env;

const admin = new RelaycastMessagingClient({ workspaceKey, baseUrl: RELAY_OTHER });
const client = async (name, baseUrl) =>
  new RelaycastMessagingClient({ workspaceKey, agentToken: (await admin.agents.register({ name })).token, baseUrl });
const lead = await client('lead', RELAY_OTHER);
const ada = await client('ada', RELAY_FRONT);
await lead.channels.create({ name: 'work' });
await ada.channels.join('work');

let opened = 0;
const shown = [];
ada.events.on('connected', () => { opened += 1; });
ada.events.on('messageCreated', (event) => shown.push(event.message.text));
ada.events.connect();
await until('the socket opens', () => opened > 0);

const posts = [];
const post = async (text) => posts.push([text, (await lead.messages.send({ channel: 'work', text })).id]);
const received = (claim) => until(claim, () => shown.length >= posts.length, () => shown);

if (process.env.RELAY_STANDBY_LAGS) await ask('hold the standby back');
for (let n = 1; n <= 3; n += 1) await post(`before ${n}`);
await received('what is posted before arrives live');

await ask('kill -9 the gateway');
for (let n = 1; n <= 10; n += 1) await post(`meanwhile ${n}`);
if (process.env.RELAY_REFUSED) await ask('let the client connect');
await received('what was posted meanwhile arrives');
check('over a new connection', opened >= 2, opened);
for (let n = 1; n <= 3; n += 1) await post(`after ${n}`);
await received('what is posted after that arrives live');
same('everything in order, once', shown, posts.map(([text]) => text));
await until('all of it is acked', async () => (await ada.inbox.list()).items.length === 0);
await report(posts);
finish();
