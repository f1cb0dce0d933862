// What of the client's surface the engine does not serve, and why. Each is asked for all the same: when it works,
// its reason is no longer true.

import { refused } from './harness.mjs';

const NO_DATE = 'answered with 404 not_found, as docs/compatibility.md says';

const calls = {
  'RelayCast.agents.spawn': [
    'no machine runs agents here: tests/spawn.rs and tests/broker_spawn.rs have some',
    ({ relay }) => relay.agents.spawn({ name: 'new', cli: 'claude', task: 'work' }), 'transport_error',
  ],
  'RelayCast.certify.submit': [NO_DATE, ({ relay }) => relay.certify.submit({ agentUrl: 'https://agent.example.com' })],
  'RelayCast.certify.get': [NO_DATE, ({ relay }) => relay.certify.get('1')],
  'RelayCast.certify.monitor': [NO_DATE, ({ relay }) => relay.certify.monitor({ agentUrl: 'https://agent.example.com' })],
  'RelayCast.registerA2a': [NO_DATE, ({ relay }) => relay.registerA2a({ agentCardUrl: 'https://agent.example.com/card' })],
  'RelayCast.listA2aAgents': [NO_DATE, ({ relay }) => relay.listA2aAgents()],
  'RelayCast.removeA2aAgent': [NO_DATE, ({ relay }) => relay.removeA2aAgent('ada')],
  'RelayCast.getA2aAgentCard': [NO_DATE, ({ relay }) => relay.getA2aAgentCard('ada')],
  'RelayCast.route': [NO_DATE, ({ relay }) => relay.route('grinding', 'some corn')],
  'RelayCast.routeFeedback': [NO_DATE, ({ relay }) => relay.routeFeedback({ agentName: 'ada', success: true })],
  'RelayCast.getRoutingConfig': [NO_DATE, ({ relay }) => relay.getRoutingConfig()],
  'RelayCast.updateRoutingConfig': [NO_DATE, ({ relay }) => relay.updateRoutingConfig({ circuitBreakerThreshold: 3 })],
  'RelayCast.searchDirectory': [NO_DATE, ({ relay }) => relay.searchDirectory({ q: 'corn' })],
  'RelayCast.publishToDirectory': [NO_DATE, ({ relay }) => relay.publishToDirectory({ slug: 'ada', name: 'Ada' })],
  'RelayCast.listDirectory': [NO_DATE, ({ relay }) => relay.listDirectory({ limit: 1 })],
  'RelayCast.getDirectoryAgent': [NO_DATE, ({ relay }) => relay.getDirectoryAgent('ada')],
  'RelayCast.updateDirectoryAgent': [NO_DATE, ({ relay }) => relay.updateDirectoryAgent('ada', { name: 'Ada' })],
  'RelayCast.deleteDirectoryAgent': [NO_DATE, ({ relay }) => relay.deleteDirectoryAgent('ada')],
  'RelayCast.listDirectoryRatings': [NO_DATE, ({ relay }) => relay.listDirectoryRatings('ada')],
  'RelayCast.rateDirectoryAgent': [NO_DATE, ({ relay }) => relay.rateDirectoryAgent('ada', { score: 5 })],
  'RelayCast.importSkills': [NO_DATE, ({ relay }) => relay.importSkills({ agentName: 'ada', skills: [{ name: 'grinding' }] })],
  'RelayCast.searchSkills': [NO_DATE, ({ relay }) => relay.searchSkills({ q: 'corn' })],
};

/** Listeners that nothing calls yet, or ever. */
const silent = {
  ...Object.fromEntries(['RelayCast', 'AgentClient'].flatMap((client) => [
    [`${client}.on.messageUpdated`, 'no client can change a message'],
    [`${client}.on.error`, 'heard where there is no server'],
    [`${client}.on.permanentlyDisconnected`, 'the same'],
  ])),
  'AgentClient.on.resynced': 'the socket of an agent is a node\'s: the client never asks there',
  // Those who observe hear of all of them.
  ...Object.fromEntries(['deliveryDelivered', 'deliveryDeferred', 'deliveryFailed'].map((name) => [
    `AgentClient.on.${name}`, 'a connected client has acknowledged what it is sent before anything else could become of it',
  ])),
};

/** What a race may let happen all the same. */
export const mayHappen = new Set(Object.keys(silent).filter((name) => name.startsWith('AgentClient.on.delivery')));

/** The listeners of a client that keeps its server are silent by these names. */
export const silentListeners = silent;

/** Reasons by name. What is heard where there is no server is not left out. */
export const leftOut = Object.fromEntries([
  ...Object.entries(calls).map(([name, [reason]]) => [name, reason]),
  ...Object.entries(silent).filter(([name]) => !/\.(error|permanentlyDisconnected)$/.test(name)),
]);

/** All of it is refused, as a route that is not there unless it says how. */
export async function isRefused(world) {
  for (const [name, [, call, code = 'not_found']] of Object.entries(calls)) await refused(name, code, () => call(world));
}
