// Every public method of the published driver against our broker, which it starts itself.
// Arguments: the broker, the fake agent, a working directory, a file for the agent's messages.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

import { HarnessDriverClient } from '@agent-relay/harness-driver';

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

const driver = await HarnessDriverClient.spawn({
  binaryPath: broker,
  cwd,
  brokerName: 'driven',
  workspaceKey: process.env.RELAY_WORKSPACE_KEY,
  channels: ['general'],
});
try {
  const session = await driver.getSession();
  assert.equal(session.protocol_version, 2);
  assert.equal(session.mode, 'ephemeral');
  assert.equal((await driver.healthCheck()).service, 'agent-relay-listen');
  assert.ok((await driver.getConfig()).workspaceKey);
  assert.equal((await driver.renewLease()).renewed, true);
  await driver.preflight([{ name: 'x', cli: 'claude' }]);

  const agent = await driver.spawnCli({
    name: 'a b#c',
    cli: fakeAgent,
    args: ['cooked', '--log', log],
    channels: ['general'],
    task: 'first task',
  });
  assert.ok(agent.pid > 0);
  await assert.rejects(driver.spawnCli({ name: 'a b#c', cli: 'cat' }), { code: 'agent_already_exists', retryable: false });
  await until('the task', () => driver.queryEvents({ kind: 'delivery_verified' }).length === 1);
  assert.match(messages()[0], /first task$/);
  assert.equal((await driver.listAgents())[0].name, 'a b#c');

  await driver.sendMessage({ to: 'a b#c', text: 'through the engine', from: 'pat' });
  await until('the message', () => messages().some((line) => line.endsWith('through the engine')));
  await driver.setInboundDeliveryMode('a b#c', 'manual_flush');
  assert.equal(await driver.getInboundDeliveryMode('a b#c'), 'manual_flush');
  await driver.sendMessage({ to: 'a b#c', text: 'held', from: 'pat' });
  await until('a pending message', async () => (await driver.getPending('a b#c')).length === 1);
  assert.deepEqual(await driver.flushPending('a b#c'), { flushed: 1 });
  await driver.setInboundDeliveryMode('a b#c', 'auto_inject');

  await driver.sendInput('a b#c', 'typed\r');
  await until('keys', () => messages().some((line) => line.endsWith(' typed')));
  const stream = driver.openInputStream('a b#c');
  await stream.send('streamed\r');
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
  const result = await judge.waitForResult(20_000);
  assert.deepEqual([result.reason, result.data], ['result', { score: 7 }]);
  await driver.release('judge', 'done');

  // The test puts a program of this name in the path.
  const clerk = await driver.spawnHeadless({ name: 'clerk', cli: 'claude' });
  assert.equal(clerk.runtime, 'headless');
  await driver.sendMessage({ to: 'clerk', text: 'to a run', from: 'pat' });
  const ofClerk = (event) => event.name === 'clerk' && event.verification === 'api';
  await until('the run', () => driver.queryEvents({ kind: 'delivery_verified' }).some(ofClerk));
  await assert.rejects(driver.sendInput('clerk', 'x'), { code: 'unsupported_runtime', status: 409 });
  await driver.release('clerk');

  const failing = await driver.spawnCli({ name: 'failing', cli: 'sh', args: ['-c', 'sleep 1; exit 4'] });
  const ended = await failing.waitForExit(20_000);
  assert.deepEqual([ended.reason, ended.code], ['exited', 4]);
  const idle = await driver.spawnCli({ name: 'idle', cli: 'cat', idleThresholdSecs: 1 });
  assert.equal((await idle.waitForIdle(20_000)).reason, 'idle');
  await agent.release('done');
  await assert.rejects(driver.snapshot('a b#c'), { code: 'agent_not_found', status: 404 });
} finally {
  await driver.shutdown();
}
console.log('done');
