// @relaycast/sdk 6.0.2: a live client whose gateway is killed with kill -9 gets the rest through the other one.
// Given: RELAY_FRONT (leads to the gateway that will be killed, later to the other), RELAY_OTHER (the other one),
// RELAY_KEY (a workspace's key).
// With RELAY_STANDBY_LAGS, everything after the joining is missing on the standby of the database. With RELAY_REFUSED,
// the client's upgrades are refused instead, until the test is asked to let it connect.

import { RelayCast } from '@relaycast/sdk';
import { ask, check, finish, live, report, same, until } from './harness.mjs';

const { RELAY_FRONT, RELAY_OTHER, RELAY_KEY: apiKey } = process.env;

const there = new RelayCast({ apiKey, baseUrl: RELAY_OTHER });
const lead = there.as((await there.agents.register({ name: 'lead' })).token);
const { id, token } = await there.agents.register({ name: 'ada' });
const ada = new RelayCast({ apiKey, baseUrl: RELAY_FRONT }).as(token);
await lead.channels.create({ name: 'work' });
await ada.channels.join('work');

const seen = await live(ada);
const got = seen.events;

const posts = [];
const post = async (text) => posts.push([text, (await lead.send('work', text)).id]);
const received = (claim) => until(claim, () => got.length >= posts.length, () => got.map((event) => event[1]));
const floor = async () => (await there.nodes.listAgents(`direct-${id}`))[0]?.deliveryAckSeq;

if (process.env.RELAY_STANDBY_LAGS) await ask('hold the standby back');
for (let n = 1; n <= 3; n += 1) await post(`before ${n}`);
await received('what is posted before arrives live');
await until('and is acked', async () => (await floor()) === 3);

await ask('kill -9 the gateway');
for (let n = 1; n <= 10; n += 1) await post(`meanwhile ${n}`);
if (process.env.RELAY_REFUSED) await ask('let the client connect');
await received('what was posted meanwhile arrives through the other gateway');
check('over a new connection', seen.opened >= 2, seen.opened);
for (let n = 1; n <= 3; n += 1) await post(`after ${n}`);
await received('what is posted after that arrives live');
const shown = got.map((event) => event[1]);
same('everything in order, once', shown, posts.map(([text]) => text));
await until('all of it is acked', async () => (await floor()) === posts.length);
same('requests work through the other gateway', (await ada.me()).name, 'ada');
await report(posts);
finish();
