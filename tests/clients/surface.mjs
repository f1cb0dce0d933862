// The public surface of @relaycast/sdk, read from the installed package, and what of it a script has used.

import { readFileSync, readdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import * as sdk from '@relaycast/sdk';
import { check } from './harness.mjs';

const used = new Set();

/** The names that TypeScript calls private, by class: at run time they look like the others. */
function privateNames() {
  const folder = dirname(createRequire(import.meta.url).resolve('@relaycast/sdk'));
  const files = readdirSync(folder, { recursive: true }).filter((file) => String(file).endsWith('.d.ts'));
  const classes = new Map();
  for (const file of files) {
    const text = readFileSync(join(folder, String(file)), 'utf8');
    for (const [, name, body] of text.matchAll(/^export declare class (\w+)[^{]*\{\n(.*?)^\}/gms)) {
      classes.set(name, new Set([...body.matchAll(/^ {4}private (?:static |readonly )*(\w+)/gm)].map((match) => match[1])));
    }
  }
  return classes;
}

const isClass = (value) => typeof value === 'function' && /^class\b/.test(Function.prototype.toString.call(value));
const isNamespace = (value) => value !== null && typeof value === 'object' && Object.getPrototypeOf(value) === Object.prototype;
const isMember = (value) => typeof value === 'function' || (isNamespace(value) && Object.values(value).some(isMember));

function* members(label, namespace, hidden = new Set()) {
  for (const [name, value] of Object.entries(namespace)) {
    if (hidden.has(name)) continue;
    if (typeof value === 'function') yield `${label}.${name}`;
    else if (isMember(value)) yield* members(`${label}.${name}`, value);
  }
}

/** Every public method, accessor and function of the package; `instances` shows the fields that constructors make. */
export function surface(instances) {
  const hidden = privateNames();
  const names = new Set();
  for (const [name, value] of Object.entries(sdk)) {
    if (!isClass(value)) {
      if (typeof value === 'function') names.add(name);
      continue;
    }
    const secret = hidden.get(name) ?? new Set();
    for (const member of Object.getOwnPropertyNames(value)) {
      if (typeof value[member] === 'function' && !secret.has(member)) names.add(`${name}.${member}`);
    }
    for (const member of Object.getOwnPropertyNames(value.prototype)) {
      if (member !== 'constructor' && !secret.has(member)) names.add(`${name}.${member}`);
    }
    for (const member of members(name, instances[name] ?? {}, secret)) names.add(member);
  }
  return names;
}

function note(label, outcome) {
  if (outcome !== null && typeof outcome === 'object' && typeof outcome.then === 'function') {
    return outcome.then((value) => (used.add(label), value));
  }
  used.add(label);
  return outcome;
}

/** The same object; what is called on it and succeeds counts as used. A listener counts when it is called. */
export function watch(label, object) {
  return new Proxy(object, {
    get(target, name) {
      const value = Reflect.get(target, name, target);
      const path = `${label}.${String(name)}`;
      if (isNamespace(value) && isMember(value)) return watch(path, value);
      if (typeof value !== 'function') {
        used.add(path);
        return value;
      }
      if (label.endsWith('.on')) {
        return (listener) => value.call(target, (...event) => (used.add(path), listener(...event)));
      }
      return (...given) => note(path, value.apply(target, given));
    },
  });
}

/** The package itself, watched: its functions and the static methods of its classes. */
export const watched = new Proxy(sdk, {
  get(target, name) {
    const value = target[name];
    if (typeof value !== 'function') return value;
    return isClass(value) ? watch(name, value) : (...given) => note(name, value(...given));
  },
});

/** Fails unless everything public was used or is left out for a reason, and nothing left out was used that cannot be. */
export function wholeSurfaceWasUsed(instances, leftOut, mayHappen) {
  const names = surface(instances);
  check('the surface was found', names.size > 150, names.size);
  const missing = [...names].filter((name) => !used.has(name) && !(name in leftOut));
  check(`all ${names.size} public names are used or left out for a reason`, missing.length === 0, missing);
  const stale = Object.keys(leftOut).filter((name) => !names.has(name) || (used.has(name) && !mayHappen.has(name)));
  check('what is left out exists, and does not work', stale.length === 0, stale);
}
