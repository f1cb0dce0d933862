// Checks every answer and frame against the schemas that the client's authors publish (@relaycast/types).
// The client itself checks almost none of them.

import * as types from '@relaycast/types';
import { check } from './harness.mjs';

const list = (schema) => schema.array();
const message = types.MessageWithMetaSchema;
/** What a request is answered with; the first that fits counts. */
const ROUTES = [
  ['POST', 'workspaces', types.CreateWorkspaceResponseSchema],
  ['GET', 'workspaces/by-name/[^/]+', types.WorkspaceLookupSchema],
  ['(GET|PATCH)', 'workspace', types.WorkspaceSchema],
  ['(GET|PUT)', 'workspace/system-prompt', types.SystemPromptSchema],
  ['POST', 'agents', types.CreateAgentResponseSchema],
  ['GET', 'agents', list(types.AgentSchema)],
  ['GET', 'agents/presence', list(types.AgentPresenceInfoSchema)],
  ['(GET|PATCH)', 'agents/[^/]+', types.AgentSchema],
  ['GET', 'agent', types.AgentSchema],
  ['POST', 'agents/[^/]+/rotate-token', types.TokenRotateResponseSchema],
  ['POST', 'channels', types.ChannelSchema],
  ['GET', 'channels', list(types.ChannelSchema)],
  ['(GET|PATCH)', 'channels/[^/]+(/topic)?', types.ChannelSchema],
  ['GET', 'channels/[^/]+/members', list(types.ChannelMemberInfoSchema)],
  ['GET', 'channels/[^/]+/read-status', list(types.ChannelReadStatusSchema)],
  ['POST', 'channels/[^/]+/join', types.JoinChannelResponseSchema],
  ['POST', 'channels/[^/]+/invite', types.InviteChannelResponseSchema],
  ['POST', 'channels/[^/]+/(un)?mute', types.MuteChannelResponseSchema],
  ['POST', 'channels/[^/]+/messages', message],
  ['GET', 'channels/[^/]+/messages', list(message)],
  ['GET', 'messages/[^/]+', message],
  ['GET', 'messages/[^/]+/reactions', list(types.ReactionGroupSchema)],
  ['POST', 'messages/[^/]+/reactions', types.AddedReactionSchema],
  ['POST', 'messages/[^/]+/read', types.ReadReceiptSchema],
  ['GET', 'messages/[^/]+/readers', list(types.ReaderInfoSchema)],
  ['POST', 'dm', types.SendDmResponseSchema],
  ['GET', 'dm/conversations', list(types.DmConversationSummarySchema)],
  ['GET', 'dm/conversations/all', list(types.WorkspaceDmConversationSchema)],
  ['POST', 'dm/group', types.CreateGroupDmResponseSchema],
  ['POST', 'dm/[^/]+/participants', types.GroupDmParticipantResponseSchema],
  ['POST', 'dm/[^/]+/messages', types.GroupDmMessageResponseSchema],
  ['GET', 'dm/[^/]+/messages', list(types.DmMessageSchema)],
  ['GET', 'inbox', types.InboxResponseSchema],
  ['GET', 'search', list(types.SearchMessageResultSchema)],
  ['GET', 'activity', list(types.ActivityItemSchema)],
  ['GET', 'deliveries', list(types.DeliveryItemSchema)],
  ['POST', 'deliveries/[^/]+/(ack|fail|defer)', types.DeliverySchema],
  ['POST', 'files/upload', types.UploadResponseSchema],
  ['POST', 'files/[^/]+/complete', types.CompleteUploadResponseSchema],
  ['GET', 'files', list(types.FileInfoSchema)],
  ['GET', 'files/[^/]+', types.FileInfoSchema],
  ['POST', 'webhooks', types.CreateWebhookResponseSchema],
  ['GET', 'webhooks', list(types.WebhookSchema)],
  ['POST', 'hooks/[^/]+', types.WebhookTriggerResponseSchema],
  ['POST', 'subscriptions', types.CreateSubscriptionResponseSchema],
  ['GET', 'subscriptions', list(types.EventSubscriptionSchema)],
  ['GET', 'subscriptions/[^/]+', types.EventSubscriptionSchema],
  ['POST', 'observer-tokens(/[^/]+/rotate)?', types.ObserverTokenSchema.required({ token: true })],
  ['GET', 'observer-tokens', list(types.ObserverTokenSchema)],
  ['(GET|PATCH)', 'observer-tokens/[^/]+', types.ObserverTokenSchema],
].map(([method, path, schema]) => ({ route: `${method} ${path}`, fits: new RegExp(`^${method} /v1/${path}$`), schema }));

const seen = new Set();
const wrong = [];

function judge(what, schema, value) {
  const { success, error } = schema.safeParse(value);
  if (!success) wrong.push({ what, issues: error.issues.slice(0, 3), value: JSON.stringify(value).slice(0, 600) });
}

async function judgeAnswer(method, url, answer) {
  const { pathname } = new URL(url);
  if (!pathname.startsWith('/v1/') || answer.status === 204) return;
  const what = `${method} ${pathname}`;
  const body = await answer.json().catch(() => undefined);
  judge(what, types.ApiResponseSchema(types.FleetWireJsonValueSchema), body);
  const route = ROUTES.find(({ fits }) => fits.test(what));
  if (!route || body?.ok !== true) return;
  seen.add(route.route);
  judge(what, route.schema, body.data);
}

function judgeFrame(path, text) {
  const frame = JSON.parse(text);
  seen.add(`${path} ${frame.type}`);
  if (path === '/v1/node/ws') judge(`${path} ${frame.type}`, types.FleetRelaycastToBrokerMessageSchema, frame);
  // The published type of events lacks what is for observers only.
  else if (!/^((node|delivery\.depth|harness|token|workspace|access)\.|action\.(registered|taken_over)$)/.test(frame.type)) judge(`${path} ${frame.type}`, types.ServerEventSchema, frame);
}

/** From here on every answer and every frame is checked; the client gets them as they are. */
export function checkAnswers() {
  const { fetch: send, WebSocket: Socket } = globalThis;
  globalThis.fetch = async (url, options = {}) => {
    const answer = await send(url, options);
    await judgeAnswer(options.method ?? 'GET', String(url), answer.clone());
    return answer;
  };
  globalThis.WebSocket = class extends Socket {
    constructor(url, ...rest) {
      super(url, ...rest);
      const { pathname } = new URL(url);
      this.addEventListener('message', ({ data }) => judgeFrame(pathname, String(data)));
    }
  };
}

/** Fails when an answer was not as published, or when a route of the table was never answered. */
export function answersWereRight() {
  check(`answers of ${seen.size} routes and frames are as published`, wrong.length === 0, wrong);
  const unseen = ROUTES.filter(({ route }) => !seen.has(route)).map(({ route }) => route);
  check('every route of the table was answered', unseen.length === 0, unseen);
}
