/** Frames between a runner and its broker. */

/** Version of the envelope. */
export const VERSION = 2;

export interface Frame {
  v: number;
  type: string;
  request_id?: string;
  payload: Record<string, unknown>;
}

/** Capability of a node: an action that it handles, or a program that it starts. */
export interface Capability {
  name: string;
  kind?: 'action' | 'spawn';
  metadata?: Record<string, unknown>;
}

/** What a runner offers. */
export interface Manifest {
  name: string;
  node_id?: string;
  capabilities: Capability[];
  max_agents?: number;
  tags?: string[];
  version?: string;
}

/** Agent to start; the fields of `POST /api/spawn`. */
export interface AgentSpec {
  name: string;
  runtime: 'pty' | 'headless';
  cli?: string;
  args?: string[];
  channels?: string[];
  cwd?: string;
  model?: string;
  team?: string;
  session_id?: string;
  restart_policy?: unknown;
  harness_config?: unknown;
  [field: string]: unknown;
}

/** Message to send; the fields of `POST /api/send`. */
export interface MessageInput {
  to: string;
  text: string;
  from?: string;
  thread_id?: string;
  workspace_id?: string;
  workspace_alias?: string;
  mode?: 'wait' | 'steer';
  priority?: number | string;
  data?: Record<string, unknown>;
}

/** Refusal of a request, or its loss with the connection. */
export class RunnerError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly retryable: boolean,
  ) {
    super(message);
    this.name = 'RunnerError';
  }
}

/** Reads a frame; `undefined` for anything else. */
export function decode(text: string): Frame | undefined {
  let frame: unknown;
  try {
    frame = JSON.parse(text);
  } catch {
    return undefined;
  }
  if (typeof frame !== 'object' || frame === null) return undefined;
  const { v, type, payload } = frame as Partial<Frame>;
  const isFrame = v === VERSION && typeof type === 'string' && typeof payload === 'object' && payload !== null;
  return isFrame ? (frame as Frame) : undefined;
}
