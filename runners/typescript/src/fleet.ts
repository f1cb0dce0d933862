/** Nodes that are defined with `@agent-relay/fleet`, which has no network code of its own. */

import type { AgentSpec, Capability, MessageInput } from './frames.js';
import { Runner, type RunnerOptions } from './runner.js';
import type { Handler, HandlerContext } from './session.js';

/** The parts of a definition that are used here. */
export interface FleetDefinition {
  readonly __agentRelayFleetNode: true;
  readonly name: string;
  readonly maxAgents?: number;
  readonly capabilities: Record<string, FleetCapability>;
  readonly triggers?: readonly unknown[];
  readonly tags?: string[];
  readonly version?: string;
}

interface FleetCapability {
  name: string;
  kind: 'action' | 'spawn';
  // Their types belong to the package of the definition.
  handler: (input: any, context: any) => unknown;
  input?: {
    safeParse(input: unknown): { success: true; data: unknown } | { success: false; error: { message: string } };
  };
  metadata?: Record<string, unknown>;
}

/** Returns a runner for a definition made by `defineNode`. */
export function fleetRunner(
  definition: FleetDefinition,
  options: Omit<RunnerOptions, 'manifest' | 'handlers'> = {},
): Runner {
  if (definition.__agentRelayFleetNode !== true) throw new Error('not a definition made by defineNode');
  if (definition.triggers?.length) {
    throw new Error('triggers are kept by the engine: create them there; a runner talks to its broker only');
  }
  const capabilities = Object.values(definition.capabilities);
  const node = {
    name: definition.name,
    capabilities: Object.keys(definition.capabilities),
    ...(definition.maxAgents === undefined ? {} : { maxAgents: definition.maxAgents }),
  };
  const handlers = capabilities.map((capability): [string, Handler] => [
    capability.name,
    (input, context) => capability.handler(parse(capability, input), fleetContext(node, context)),
  ]);
  return new Runner({
    ...options,
    manifest: {
      name: definition.name,
      capabilities: capabilities.map(
        ({ name, kind, metadata }): Capability => ({ name, kind, ...(metadata ? { metadata } : {}) }),
      ),
      ...(definition.maxAgents === undefined ? {} : { max_agents: definition.maxAgents }),
      ...(definition.tags ? { tags: definition.tags } : {}),
      ...(definition.version ? { version: definition.version } : {}),
    },
    handlers: Object.fromEntries(handlers),
  });
}

function parse(capability: FleetCapability, input: unknown): unknown {
  if (!capability.input) return input;
  const parsed = capability.input.safeParse(input);
  if (parsed.success) return parsed.data;
  throw new Error(parsed.error.message);
}

interface FleetSpawn {
  agent: AgentSpec;
  initialTask?: string;
  skipRelayPrompt?: boolean;
  invocationId?: string;
}

interface FleetMessage extends MessageInput {
  threadId?: string;
  workspaceId?: string;
  workspaceAlias?: string;
}

function fleetContext(node: object, { invocationId, session }: HandlerContext): object {
  return {
    node,
    invocationId,
    relay: {
      sendMessage({ threadId, workspaceId, workspaceAlias, ...message }: FleetMessage) {
        return session.send({
          ...message,
          ...(threadId ? { thread_id: threadId } : {}),
          ...(workspaceId ? { workspace_id: workspaceId } : {}),
          ...(workspaceAlias ? { workspace_alias: workspaceAlias } : {}),
        });
      },
    },
    spawnAgent({ agent, initialTask, skipRelayPrompt, invocationId: own }: FleetSpawn) {
      return session.spawn(agent, {
        ...(initialTask === undefined ? {} : { task: initialTask }),
        ...(skipRelayPrompt === undefined ? {} : { skipRelayPrompt }),
        invocationId: own ?? invocationId,
      });
    },
  };
}
