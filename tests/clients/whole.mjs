// @relaycast/sdk 6.0.2, all of its public surface, against two gateways of which one is killed and comes back.
// Given: RELAY_FRONT (leads to the gateway that is killed, then to the other), RELAY_OTHER (the other one).

import { answersWereRight, checkAnswers } from './answers.mjs';
import { finish, same } from './harness.mjs';
import { watched, wholeSurfaceWasUsed } from './surface.mjs';
import { isRefused, leftOut, mayHappen, silentListeners } from './whole_left_out.mjs';
import * as messaging from './whole_messaging.mjs';
import * as rest from './whole_rest.mjs';
import * as setup from './whole_setup.mjs';
import * as streams from './whole_streams.mjs';

const { RELAY_FRONT: front, RELAY_OTHER: other } = process.env;

/** Runs a part and tells what it took. */
async function part(run, ...given) {
  const start = Date.now();
  const result = await run(...given);
  console.log(`        ${run.name}: ${Date.now() - start} ms`);
  return result;
}

checkAnswers();
await part(setup.setups, front, other);
const world = await part(setup.identities, front, other);
const open = await part(streams.open, world);
await part(messaging.channels, world);
await part(messaging.messages, world);
const talk = await part(messaging.direct, world);
await part(messaging.unread, world);
await part(messaging.search, world);
await part(messaging.deliveries, world);
await part(rest.files, world);
await part(rest.hooks, world);
await part(rest.observerTokens, world, other);
await part(rest.sessions, world);
await part(streams.subscriptions, world);
await part(streams.survive, world, open);
await part(streams.sockets, world, other);
await part(rest.nodes, world, other);
await part(rest.actions, world, open, other);
await part(rest.figures, world, talk);
await part(setup.helpers, world, other);
await part(isRefused, world);
same('a badge has an address', world.relay.certify.badgeUrl('1'), new URL('/v1/certify/1/badge.svg', front).href);
await part(streams.told, world, open, silentListeners);
await part(streams.nowhere, world);

const { RelayCast, RelaycastSetup, WsClient, NodeProviderClient, HttpClient } = await import('@relaycast/sdk');
const [relay, http] = [new RelayCast({ apiKey: world.apiKey, baseUrl: other }), new HttpClient({ apiKey: world.apiKey, baseUrl: other })];
const handle = await new RelaycastSetup({ baseUrl: other }).joinWorkspace(world.workspaceId, world.apiKey);
wholeSurfaceWasUsed({
  RelayCast: relay,
  AgentClient: relay.as('none'),
  WorkspaceHandle: handle,
  RelaycastSetup: new RelaycastSetup({ baseUrl: other }),
  Relay: new watched.Relay(relay.as('none')),
  WsClient: new WsClient({ token: 'none', baseUrl: other }),
  NodeProviderClient: new NodeProviderClient({ baseUrl: other, nodeToken: 'none', nodeId: 'none', nodeName: 'none', provider: { name: 'none' } }),
  HttpClient: http,
}, leftOut, mayHappen);
answersWereRight();

finish();
