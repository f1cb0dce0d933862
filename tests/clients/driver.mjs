// Every public method of the published driver against our broker, which it starts itself at the first gateway.
// Arguments: the broker, the fake agent, a working directory, a file for the agent's messages. An agent of the token
// SENDER_TOKEN writes at SECOND_GATEWAY.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

import { BrokerDriver, HarnessDriverClient } from '@agent-relay/harness-driver';

import { useParts } from './driver_parts.mjs';
import { surface, unknownExports, watch } from './driver_surface.mjs';

const [broker, fakeAgent, cwd, log] = process.argv.slice(2);

async function until(what, check) {
  for (let turn = 0; turn < 400; turn++) {
    const value = await check();
    if (value) return value;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error(`waited for ${what}`);
}

const messages = () => readFileSync(log, 'utf8').trim().split('\n');
const asHandle = (handle) => watch('SpawnedAgentHandle', handle);
const asClient = (client) => watch('HarnessDriverClient', client);

const Driver = asClient(HarnessDriverClient);
const driver = asClient(
  await Driver.spawn({
    binaryPath: broker,
    cwd,
    brokerName: 'driven',
    workspaceKey: process.env.RELAY_WORKSPACE_KEY,
    channels: ['general'],
    binaryArgs: { stateDir: `${cwd}/state` },
  }),
);
const connectionPath = `${cwd}/state/connection.json`;
let exited;
try {
  const session = await driver.getSession();
  assert.equal(session.protocol_version, 2);
  assert.equal(session.mode, 'ephemeral');
  assert.equal((await driver.healthCheck()).service, 'agent-relay-listen');
  assert.ok((await driver.getConfig()).workspaceKey);
  assert.equal((await driver.renewLease()).renewed, true);
  await driver.preflight([{ name: 'x', cli: 'claude' }]);
  assert.ok(driver.brokerPid > 0);
  exited = new Promise((resolve) => driver.onBrokerExit(resolve));

  const agent = asHandle(
    await driver.spawnCli({
      name: 'a b#c',
      cli: fakeAgent,
      args: ['cooked', '--log', log],
      channels: ['general'],
      task: 'first task',
    }),
  );
  assert.ok(agent.pid > 0);
  await assert.rejects(driver.spawnCli({ name: 'a b#c', cli: 'cat' }), { code: 'agent_already_exists', retryable: false });
  await until('the task', () => driver.queryEvents({ kind: 'delivery_verified' }).length === 1);
  assert.match(messages()[0], /first task$/);
  assert.equal((await driver.listAgents())[0].name, 'a b#c');

  await driver.sendMessage({ to: 'a b#c', text: 'through the engine', from: 'pat' });
  await until('the message', () => messages().some((line) => line.endsWith('through the engine')));
  const posted = await fetch(`${process.env.SECOND_GATEWAY}/v1/dm`, {
    method: 'POST',
    headers: { authorization: `Bearer ${process.env.SENDER_TOKEN}`, 'content-type': 'application/json' },
    body: JSON.stringify({ to: 'a b#c', text: 'from the other gateway' }),
  });
  assert.ok(posted.ok, await posted.text());
  await until('the message', () => messages().some((line) => line.endsWith('from the other gateway')));
  await driver.setInboundDeliveryMode('a b#c', 'manual_flush');
  assert.equal(await driver.getInboundDeliveryMode('a b#c'), 'manual_flush');
  await driver.sendMessage({ to: 'a b#c', text: 'held', from: 'pat' });
  await until('a pending message', async () => (await driver.getPending('a b#c')).length === 1);
  assert.deepEqual(await driver.flushPending('a b#c'), { flushed: 1 });
  await driver.setInboundDeliveryMode('a b#c', 'auto_inject');

  await driver.sendInput('a b#c', 'typed\r');
  await until('keys', () => messages().some((line) => line.endsWith(' typed')));
  const stream = watch('PtyInputStream', driver.openInputStream('a b#c'));
  await stream.waitUntilOpen();
  assert.equal((await stream.send('streamed\r')).bytes_written, 9);
  assert.deepEqual([stream.bufferedAmountBytes, stream.srttMs >= 0, stream.closed], [0, true, false]);
  stream.close();
  await until('streamed keys', () => messages().some((line) => line.endsWith(' streamed')));
  await driver.resizePty('a b#c', 30, 100);
  const screen = await driver.snapshot('a b#c');
  assert.deepEqual([screen.rows, screen.cols], [30, 100]);
  assert.match(screen.screen, /streamed/);
  assert.equal((await driver.snapshot('a b#c', 'ansi')).format, 'ansi');
  await driver.setModel('a b#c', 'opus');
  await driver.subscribeChannels('a b#c', ['#driven']);
  await driver.unsubscribeChannels('a b#c', ['driven']);
  assert.equal((await driver.getMetrics()).broker.active_agents, 1);
  assert.equal((await driver.getStatus()).agent_count, 1);
  assert.equal((await driver.getCrashInsights()).health_score, 100);
  assert.ok(driver.queryEvents({ kind: 'worker_stream' }).length > 0);

  // A client that has not started the broker, and does not end it.
  const guest = asClient(Driver.connect({ connectionPath }));
  const kinds = [];
  const ignore = guest.onEvent((event) => kinds.push(event.kind));
  guest.onBrokerExit(() => assert.fail('a guest does not learn of the exit'))();
  guest.connectEvents(0);
  await until('events from the first on', () => kinds.includes('agent_spawned'));
  assert.equal(guest.getLastEvent('agent_spawned', 'a b#c').name, 'a b#c');
  const output = guest.subscribeWorkerStream('a b#c', { stream: 'stdout' })[Symbol.asyncIterator]();
  await driver.sendInput('a b#c', 'watched\r');
  for (let seen = ''; !seen.includes('watched'); ) {
    const { done, value } = await output.next();
    assert.equal(done, false);
    seen += value;
  }
  assert.equal((await output.return()).done, true);
  guest.disconnectEvents();
  ignore();
  const count = kinds.length;
  await driver.sendInput('a b#c', 'unheard\r');
  await until('the keys', () => messages().some((line) => line.endsWith(' unheard')));
  assert.equal(kinds.length, count);
  guest.disconnect();
  await guest.shutdown();
  const { url: baseUrl, api_key: apiKey } = JSON.parse(readFileSync(connectionPath));
  assert.equal((await asClient(new HarnessDriverClient({ baseUrl, apiKey })).getStatus()).agent_count, 1);
  await useParts(driver, { baseUrl, apiKey }, until);

  const started = [];
  const forget = driver.addListener('beforeAgentSpawn', () => ({ channels: ['general', 'patched'] }));
  const note = ({ result }) => started.push(result.name);
  driver.addListener('afterAgentSpawn', note);
  const restarting = asHandle(
    await driver.spawnPty({
      name: 'restarting',
      cli: fakeAgent,
      args: ['cooked', '--log', `${log}.restarting`, '--exit-after', '1', '--exit-code', '3'],
      restartPolicy: { enabled: true, max_restarts: 2, cooldown_ms: 100 },
    }),
  );
  forget();
  driver.removeListener('afterAgentSpawn', note);
  const listed = (await driver.listAgents()).find(({ name }) => name === 'restarting');
  assert.deepEqual([started, listed.channels.toSorted()], [['restarting'], ['general', 'patched']]);
  assert.equal(restarting.exit, undefined);
  await driver.sendMessage({ to: 'restarting', text: 'end', from: 'pat' });
  await until('a restart', () => driver.queryEvents({ kind: 'agent_restarted', name: 'restarting' }).length === 1);
  await restarting.release();

  const runtime = watch('BrokerDriver', new BrokerDriver({ client: driver }));
  const run = await runtime.spawn({ name: 'run', cli: 'cat' });
  assert.deepEqual([run.agent.name, run.delivery.mode], ['run', 'managed']);
  assert.match(await run.status(), /^(busy|idle)$/);
  await runtime.release('run', 'done');
  assert.equal(await runtime.status('run'), 'offline');

  // Programs of both names are in the path of the test.
  const claude = await driver.spawnClaude({ name: 'speaker' });
  const opencode = await driver.spawnOpencode({ name: 'runner' });
  assert.deepEqual([claude.runtime, opencode.runtime], ['pty', 'headless']);
  await claude.release();
  await opencode.release();

  const judge = await driver.spawnCli({
    name: 'judge',
    cli: 'sh',
    args: [
      '-c',
      `python3 -c 'import json,os,urllib.request as u;e=os.environ;u.urlopen(u.Request(e["AGENT_RELAY_RESULT_URL"],` +
        `json.dumps({"data":{"score":7}}).encode(),{"authorization":"Bearer "+e["AGENT_RELAY_RESULT_TOKEN"]}))'; cat`,
    ],
    agentResultSchema: { type: 'object', required: ['score'] },
  });
  const result = await asHandle(judge).waitForResult(20_000);
  assert.deepEqual([result.reason, result.data], ['result', { score: 7 }]);
  await driver.release('judge', 'done');

  const clerk = await driver.spawnHeadless({ name: 'clerk', cli: 'claude' });
  assert.equal(clerk.runtime, 'headless');
  await driver.sendMessage({ to: 'clerk', text: 'to a run', from: 'pat' });
  const ofClerk = (event) => event.name === 'clerk' && event.verification === 'api';
  await until('the run', () => driver.queryEvents({ kind: 'delivery_verified' }).some(ofClerk));
  await assert.rejects(driver.sendInput('clerk', 'x'), { code: 'unsupported_runtime', status: 409 });
  await driver.release('clerk');

  const failing = asHandle(await driver.spawnCli({ name: 'failing', cli: 'sh', args: ['-c', 'sleep 1; exit 4'] }));
  const ended = await failing.waitForExit(20_000);
  assert.deepEqual([ended.reason, ended.code], ['exited', 4]);
  assert.deepEqual([failing.exit.reason, failing.exitCode, failing.exitSignal], ['exited', 4, null]);
  const idle = asHandle(await driver.spawnCli({ name: 'idle', cli: 'cat', idleThresholdSecs: 1 }));
  assert.equal((await idle.waitForIdle(20_000)).reason, 'idle');
  await agent.release('done');
  await assert.rejects(driver.snapshot('a b#c'), { code: 'agent_not_found', status: 404 });
} finally {
  await driver.shutdown();
}
assert.deepEqual([(await exited).code, driver.brokerPid], [0, undefined]);
const { count, unused } = surface();
assert.ok(count > 50, `${count} members`);
assert.deepEqual(unused, []);
assert.deepEqual(await unknownExports(), []);
console.log(`figures driver: ${count} public members, all used`);
console.log('done');
