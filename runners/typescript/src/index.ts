/** Hosts action handlers for a Relay broker on this machine. */

export { connectionFile, readConnection, type Connection } from './connection.js';
export { Drive, type PendingMessage } from './drive.js';
export { fleetRunner, type FleetDefinition } from './fleet.js';
export {
  RunnerError,
  type AgentSpec,
  type Capability,
  type Frame,
  type Manifest,
  type MessageInput,
} from './frames.js';
export { Runner, type RunnerOptions } from './runner.js';
export { Session, type Handler, type HandlerContext } from './session.js';
