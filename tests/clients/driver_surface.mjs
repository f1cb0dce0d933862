// The public members of the published driver, read from its declarations, and those that a script has used.

import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const CLASSES = ['HarnessDriverClient', 'SpawnedAgentHandle', 'BrokerDriver', 'PtyInputStream'];
const PARTS = ['BrokerTransport', 'PredictiveEchoEngine', 'RegisteredDriverActions'];
const FILES = ['client', 'agent-handle', 'broker-driver', 'transport', 'predictive-echo', 'actions'];

/** Exports that talk to no broker, and the reason. */
const LOCAL = {
  DEFAULT_PREDICTION_CONFIG: 'a constant',
  PROTOCOL_VERSION: 'a constant',
  SpawnAgentResultSchema: 'checks answers within the client',
  HarnessDriverProtocolError: 'the error of a refused request, without methods of its own',
  registerDriverActions: 'a function; its actions and what it returns are used',
  formatBrokerNotFoundError: 'a text',
  getBrokerBinaryPath: 'looks for the published broker on the disk',
  getOptionalDepPackageName: 'a name of a package',
  harnessLookupKeys: 'words of a command line',
  resolveStaticHarnessConfig: 'turns a definition into a body of a spawn, without a request',
  __clientTestInternals: 'internals for the package’s own tests',
};

const used = new Set();

/** The same object or class. Members that are used from outside are noted; its own calls of them are not. */
export function watch(label, object) {
  return new Proxy(object, {
    get(target, name) {
      used.add(`${label}.${String(name)}`);
      const value = Reflect.get(target, name, target);
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
}

/** Every public method and accessor that is declared. */
function declared() {
  const folder = dirname(fileURLToPath(import.meta.resolve('@agent-relay/harness-driver')));
  const names = [];
  for (const file of FILES) {
    const text = readFileSync(join(folder, `${file}.d.ts`), 'utf8');
    for (const [, name, body] of text.matchAll(/^export (?:declare class|interface) (\w+)[^{]*\{\n(.*?)^\}/gms)) {
      if (!CLASSES.includes(name) && !PARTS.includes(name)) continue;
      for (const [, member] of body.matchAll(/^ {4}(?:static )?(?:get )?(\w+)(?=[(<])/gm)) {
        if (member !== 'constructor') names.push(`${name}.${member}`);
      }
    }
  }
  return new Set(names);
}

/** Exports that are neither used by a script nor known to talk to no broker. */
export async function unknownExports() {
  const exported = Object.keys(await import('@agent-relay/harness-driver'));
  return exported.filter((name) => ![...CLASSES, ...PARTS].includes(name) && !(name in LOCAL));
}

/** The number of public members, and those that were not used. */
export function surface() {
  const names = declared();
  return { count: names.size, unused: [...names].filter((name) => !used.has(name)) };
}
