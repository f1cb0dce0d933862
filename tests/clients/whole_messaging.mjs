// Channels, messages, threads, direct messages, reactions, reading and what is unread.

import { check, refused, same, until } from './harness.mjs';

const texts = (messages) => messages.map((message) => message.text);
const names = (rows) => rows.map((row) => row.agentName).sort();

export async function channels({ relay, there, agents: { ada, bob, cyd } }) {
  await relay.systemPrompt.set({ prompt: 'be brief' });
  same('the system prompt is set', await there.systemPrompt.get(), { prompt: 'be brief', isDefault: false });
  await there.systemPrompt.set({ reset: true });
  check('and reset', (await relay.systemPrompt.get()).isDefault);
  const info = await there.workspace.update({ metadata: { stage: 'test' } });
  same('a workspace is updated', [info.metadata, (await relay.workspace.info()).metadata], [{ stage: 'test' }, { stage: 'test' }]);

  await ada.channels.create({ name: 'plans', topic: 'first', metadata: { a: 1 } });
  await bob.channels.join('plans');
  await ada.channels.invite('plans', 'cyd');
  same('a channel has its members', names(await bob.channels.members('plans')), ['ada', 'bob', 'cyd']);
  same('for the workspace too', names((await relay.channels.get('plans')).members), ['ada', 'bob', 'cyd']);
  same('a topic is set', (await bob.channels.setTopic('plans', 'second')).topic, 'second');
  same('a channel is updated', (await ada.channels.update('plans', { metadata: { b: 2 } })).topic, 'second');
  same('and read by its members', (await cyd.channels.get('plans')).topic, 'second');
  await cyd.channels.leave('plans');
  same('who leaves is gone', names(await ada.channels.members('plans')), ['ada', 'bob']);
  await ada.channels.create({ name: 'short-lived' });
  await ada.channels.archive('short-lived');
  const listed = async (list, options) => (await list(options)).map((channel) => channel.name);
  for (const list of [bob.channels.list, there.channels.list]) {
    check('an archived channel is not listed', !(await listed(list)).includes('short-lived'));
    check('unless asked for', (await listed(list, { includeArchived: true })).includes('short-lived'));
  }

  await bob.channels.mute('plans');
  check('a member is shown as muted', (await ada.channels.members('plans')).find((member) => member.agentName === 'bob').isMuted);
  const before = (await bob.deliveries({ limit: 200 })).length;
  await ada.send('plans', 'not for the muted');
  same('who mutes gets nothing', (await bob.deliveries({ limit: 200 })).length, before);
  await bob.channels.unmute('plans');
  await ada.send('plans', 'for all again');
  await until('and gets it again', async () => (await bob.deliveries({ status: 'acked', limit: 200 })).length + (await bob.deliveries()).length > before);
}

export async function messages({ relay, there, agents: { ada, bob, cyd, dora }, ids }) {
  const blocks = [{ type: 'header', text: 'Plan' }, { type: 'fields', fields: [{ label: 'who', value: 'ada' }] }];
  const plan = await ada.post('#plans', 'The quick brown fox, @bob', { blocks, mode: 'steer' });
  same('a message is as it was sent', [plan.blocks, plan.mentions, plan.injectionMode], [blocks, ['bob'], 'steer']);
  const reply = await bob.reply(plan.id, 'jumps over');
  const deeper = await ada.reply(reply.id, 'the lazy dog');
  same('a reply to a reply belongs to the root', deeper.threadId, plan.id);
  for (const read of [() => relay.messages.thread(plan.id), () => bob.thread(plan.id)]) {
    const thread = await read();
    same('a thread is oldest first', [thread.parent.id, thread.parent.replyCount, texts(thread.replies)], [plan.id, 2, ['jumps over', 'the lazy dog']]);
  }
  same('in pages', texts((await bob.thread(plan.id, { limit: 1, after: reply.id })).replies), ['the lazy dog']);
  same('a message is read by id', [(await there.messages.get(plan.id)).text, (await cyd.message(plan.id)).text], [plan.text, plan.text]);
  await ada.send('plans', 'a second message');
  for (const list of [relay.messages.list, (...given) => bob.messages(...given)]) {
    same('messages are newest first, in pages', texts(await list('#plans', { limit: 2 })), ['a second message', plan.text]);
    same('before one', (await list('plans', { before: plan.id, limit: 1 })).map((message) => message.id < plan.id), [true]);
    same('after one', texts(await list('plans', { after: plan.id })), ['a second message']);
  }

  await bob.react(plan.id, '👍');
  await bob.react(plan.id, '👍');
  await ada.react(plan.id, 'tada');
  await ada.react(plan.id, 'a/b %');
  await ada.unreact(plan.id, 'a/b %');
  await ada.unreact(plan.id, 'a/b %');
  for (const read of [() => there.messages.reactions(plan.id), () => cyd.reactions(plan.id)]) {
    same('reactions are grouped', (await read()).map((group) => [group.emoji, group.count, group.agents]).sort(), [['tada', 1, ['ada']], ['👍', 1, ['bob']]]);
  }
  const reacted = await relay.messages.get(plan.id);
  same('and shown with the message', reacted.reactions.map((group) => group.emoji).sort(), ['tada', '👍']);

  const receipt = await bob.markRead(plan.id);
  same('a message is marked read', [receipt.messageId, receipt.agentId], [plan.id, ids.bob]);
  same('again is the same receipt', (await bob.markRead(plan.id)).readAt, receipt.readAt);
  same('its readers are told', names(await ada.readers(plan.id)), ['bob']);
  await refused('strangers read nothing', 'not_found', () => dora.markRead(plan.id));
}

export async function direct({ relay, there, agents: { ada, bob, cyd, dora, eve } }) {
  const dm = await ada.dm('bob', 'between us two');
  await ada.dms.sendMessage(dm.conversationId, 'and again');
  same('a conversation is newest first', texts(await bob.dms.messages(dm.conversationId)), ['and again', 'between us two']);
  same('in pages', texts(await ada.dms.messages(dm.conversationId, { limit: 1, before: (await bob.dms.messages(dm.conversationId))[0].id })), ['between us two']);
  await refused('of which strangers see nothing', 'unauthorized', () => cyd.dms.messages(dm.conversationId));
  const group = await ada.dms.createGroup({ participants: ['bob', 'cyd'], name: 'three' });
  await ada.dms.sendMessage(group.id, 'among three', { mode: 'steer' });
  same('someone is added', (await ada.dms.addParticipant(group.id, 'dora')).alreadyMember, false);
  await cyd.dms.sendMessage(group.id, 'now four');
  same('a group has its participants', (await dora.dms.conversations()).find((one) => one.id === group.id).participants.map((one) => one.agentName).sort(), ['ada', 'bob', 'cyd', 'dora']);
  await dora.dms.removeParticipant(group.id, 'dora');
  same('who leaves has it no more', (await dora.dms.conversations()).length, 0);
  const own = await bob.dms.conversations();
  same('each knows its own', own.map((one) => [one.type, one.lastMessage.text]).sort(), [['1:1', 'and again'], ['group', 'now four']]);
  same('and strangers none', await eve.dms.conversations(), []);
  const all = await relay.allDmConversations();
  same('the workspace sees all', all.map((one) => [one.messageCount, one.lastMessage.text, one.participants.length]).sort(), [[2, 'and again', 2], [2, 'now four', 3]]);
  same('and reads them', texts(await there.dmMessages(group.id, { limit: 1 })), ['now four']);
  return { dm, group };
}

export async function unread({ agents: { ada, eve } }) {
  await eve.channels.join('plans');
  await eve.markRead((await eve.messages('plans', { limit: 1 }))[0].id);
  const empty = await eve.inbox();
  same('who has read all has nothing unread', [empty.unreadChannels, empty.unreadDms, empty.mentions], [[], [], []]);
  const mine = await eve.send('plans', 'written by eve herself');
  const one = await ada.send('plans', 'unread one');
  const two = await ada.send('plans', 'unread two, @eve');
  const dm = await ada.dm('eve', 'a letter');
  await ada.react(mine.id, 'eyes');
  const inbox = await eve.inbox({ limit: 10 });
  same('what others write is unread', inbox.unreadChannels.find((one) => one.channelName === 'plans'), { channelName: 'plans', unreadCount: 2 });
  same('mentions are shown', inbox.mentions.map((mention) => [mention.id, mention.channelName, mention.agentName]), [[two.id, 'plans', 'ada']]);
  same('letters too', inbox.unreadDms.map((one) => [one.conversationId, one.from, one.unreadCount, one.lastMessage.text]), [[dm.conversationId, 'ada', 1, 'a letter']]);
  same('and reactions to one\'s own', inbox.recentReactions.map((one) => [one.messageId, one.emoji, one.agentName]), [[mine.id, 'eyes', 'ada']]);
  await eve.markRead(one.id);
  same('reading moves on', (await eve.inbox()).unreadChannels.find((one) => one.channelName === 'plans').unreadCount, 1);
  same('for all to see', (await ada.readStatus('#plans')).find((one) => one.agentName === 'eve').lastReadId, one.id);
  await eve.markRead(two.id);
  await eve.markRead(dm.message.id);
  const read = await eve.inbox();
  same('until nothing is left', [read.unreadChannels.filter((one) => one.channelName === 'plans'), read.unreadDms], [[], []]);
}

export async function search({ agents: { ada, bob, cyd, eve } }) {
  const hits = async (agent, query, options) => (await agent.search(query, options)).map((hit) => hit.text);
  same('a word is found', await hits(bob, 'fox'), ['The quick brown fox, @bob']);
  const [hit] = await bob.search('fox', { channel: 'plans', from: 'ada', limit: 5 });
  check('with where and who', hit.channelName === 'plans' && hit.agentName === 'ada' && Number.isFinite(hit.relevanceScore), hit);
  same('not from others', await hits(bob, 'fox', { from: 'bob' }), []);
  same('nor elsewhere', await hits(bob, 'fox', { channel: 'general' }), []);
  same('replies are found too', await hits(ada, 'lazy'), ['the lazy dog']);
  same('letters by those in them', await hits(bob, 'between us'), ['between us two']);
  same('and by nobody else', await hits(cyd, 'between us'), []);
  const [first] = await eve.search('unread');
  same('before and after', await hits(eve, 'unread', { before: first.id, after: '0' }), (await hits(eve, 'unread')).filter((text) => text !== first.text && text < first.text));
}

export async function deliveries({ agents: { ada, bob, eve } }) {
  for (const mailbox of await eve.deliveries({ limit: 200 })) await eve.ackDelivery(mailbox.id);
  same('a mailbox is emptied by hand', await eve.deliveries(), []);
  const sent = [];
  for (const text of ['to ack', 'to fail', 'to defer']) sent.push(await ada.dm('eve', text));
  const queued = await eve.deliveries({ status: 'queued', limit: 3 });
  same('oldest first, with the messages', queued.map((one) => one.message.text), ['to ack', 'to fail', 'to defer']);
  const [ack, fail, defer] = queued;
  same('one is acknowledged', (await eve.ackDelivery(ack.id)).status, 'acked');
  same('again is the same', (await eve.ackDelivery(ack.id)).status, 'acked');
  const failed = await eve.failDelivery(fail.id, { error: 'no use', retryable: true });
  same('one failed', [failed.status, failed.error, failed.retryable], ['failed', 'no use', true]);
  const later = new Date(Date.now() + 3_600_000).toISOString();
  const deferred = await eve.deferDelivery(defer.id, { availableAt: later, reason: 'busy' });
  same('one is put off', [deferred.status, new Date(deferred.availableAt).toISOString()], ['queued', later]);
  same('it still waits, and so does what was sent again', (await eve.deliveries()).map((one) => one.id), [defer.id, `${fail.id}_r1`]);
  same('the others are found by status', [(await eve.deliveries({ status: 'failed' })).map((one) => one.id)], [[fail.id]]);
  await refused('nobody settles another\'s', 'not_found', () => bob.ackDelivery(defer.id));
}
