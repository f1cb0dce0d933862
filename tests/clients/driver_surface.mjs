// The public members of the published driver, read from its declarations, and those that a script has used.

import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const CLASSES = ['HarnessDriverClient', 'SpawnedAgentHandle', 'BrokerDriver', 'PtyInputStream'];
const FILES = ['client', 'agent-handle', 'broker-driver', 'transport'];

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
    for (const [, name, body] of text.matchAll(/^export declare class (\w+)[^{]*\{\n(.*?)^\}/gms)) {
      if (!CLASSES.includes(name)) continue;
      for (const [, member] of body.matchAll(/^ {4}(?:static )?(?:get )?(\w+)(?=[(<])/gm)) {
        if (member !== 'constructor') names.push(`${name}.${member}`);
      }
    }
  }
  return new Set(names);
}

/** The number of public members, and those that were not used. */
export function surface() {
  const names = declared();
  return { count: names.size, unused: [...names].filter((name) => !used.has(name)) };
}
