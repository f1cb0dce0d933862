//! Construction of the handles: each holds what its use cases need, and is built after the handles that it holds.

use std::sync::Arc;

use relay_domain::{WorkspaceId, workspaces::family::FamilyId};
use relay_stream::Stream;
use relay_tasks::{
    TaskSet,
    batches::{BatchSender, Batches},
};
use tokio::sync::mpsc;

use crate::{
    EngineConfig,
    access::{
        authentication::Access,
        limits::{Limits, QuotaCache, RateLimits},
        lookups::{TokenLookups, TokenReader},
        secrets::Secrets,
        tokens::Tokens,
    },
    actions::{Actions, CallQueues, DispatchNotes, DispatchRecorder, QueuedCall, QueuedOutcome, TriggerPatterns},
    agents::{Agents, last_seen::LastSeenRecorder},
    channels::{Channels, audiences::Audiences},
    core::Core,
    due_work::DueWork,
    events::{self, Events},
    files::{FileStorage, Files},
    mailboxes::{Mailboxes, cursors::CursorMoves, unread::UnreadCache},
    messages::{
        Messages,
        committer::{CommitLane, CommitQueue},
        publisher::{CommittedBatch, Publisher},
    },
    nodes::{
        Nodes,
        direct_registrations::{RegisterRequest, registration_queue},
        kinds::NodeKinds,
        online::{OnlineRequest, online_queue},
    },
    observers::{ObserverCache, Observers, TokenUse},
    processes::Processes,
    recovery::{Recovery, RecoveryState},
    search::Search,
    subscriptions::Subscriptions,
    workspaces::{Workspaces, suspensions::Suspensions},
};

/// State of an engine: its handles, and what tasks need beside them.
pub(crate) struct Inner {
    pub(crate) core: Core,
    pub(crate) stream: Stream,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) egress: relay_egress::Client,
    pub(crate) tasks: TaskSet,
    pub(crate) publisher: Publisher,
    pub(crate) due_work: DueWork,
    pub(crate) node_kinds: NodeKinds,
    pub(crate) suspensions: Arc<Suspensions>,
    pub(crate) access: Access,
    pub(crate) actions: Actions,
    pub(crate) agents: Agents,
    pub(crate) channels: Channels,
    pub(crate) events: Events,
    pub(crate) files: Files,
    pub(crate) mailboxes: Mailboxes,
    pub(crate) messages: Messages,
    pub(crate) nodes: Nodes,
    pub(crate) observers: Observers,
    pub(crate) processes: Processes,
    pub(crate) quotas: QuotaCache,
    pub(crate) rate_limits: RateLimits,
    pub(crate) recovery: Recovery,
    pub(crate) search: Search,
    pub(crate) subscriptions: Subscriptions,
    pub(crate) workspaces: Workspaces,
}

/// Sending ends of the queues that the engine's tasks empty.
pub(crate) struct Senders {
    seen: LastSeenRecorder,
    observers: ObserverCache,
    committer: CommitQueue,
    publisher: Publisher,
    calls: CallQueues,
    dispatch_notes: DispatchRecorder,
    registrations: BatchSender<RegisterRequest, WorkspaceId>,
    online: BatchSender<OnlineRequest, WorkspaceId>,
    tokens: TokenReader,
}

/// Receiving ends of the same queues.
pub(crate) struct Queues {
    pub(crate) seen: Batches<relay_store::LastSeen>,
    pub(crate) observer_uses: Batches<TokenUse>,
    pub(crate) commits: [CommitLane; 2],
    pub(crate) publishes: mpsc::Receiver<CommittedBatch>,
    pub(crate) calls: Batches<QueuedCall, FamilyId>,
    pub(crate) outcomes: Batches<QueuedOutcome, FamilyId>,
    pub(crate) dispatch_notes: DispatchNotes,
    pub(crate) registrations: Batches<RegisterRequest, WorkspaceId>,
    pub(crate) online: Batches<OnlineRequest, WorkspaceId>,
    pub(crate) token_lookups: TokenLookups,
}

/// Creates the queues between handles and tasks.
pub(crate) fn queues() -> (Senders, Queues) {
    let (seen, seen_notes) = LastSeenRecorder::new();
    let (observers, observer_uses) = ObserverCache::new();
    let (committer, commits) = CommitQueue::new();
    let (publisher, publishes) = Publisher::new();
    let (calls, new_calls, outcomes) = CallQueues::new();
    let (recorder, dispatch_notes) = DispatchRecorder::new();
    let (registrations, register_requests) = registration_queue();
    let (online, online_requests) = online_queue();
    let (tokens, token_lookups) = TokenReader::new();
    let senders = Senders {
        seen,
        observers,
        committer,
        publisher,
        calls,
        dispatch_notes: recorder,
        registrations,
        online,
        tokens,
    };
    let queues = Queues {
        seen: seen_notes,
        observer_uses,
        commits,
        publishes,
        calls: new_calls,
        outcomes,
        dispatch_notes,
        registrations: register_requests,
        online: online_requests,
        token_lookups,
    };
    (senders, queues)
}

impl Inner {
    pub(crate) fn new(
        core: Core,
        stream: Stream,
        tasks: TaskSet,
        secrets: Arc<Secrets>,
        config: &EngineConfig,
        senders: Senders,
    ) -> Self {
        let Senders { seen, observers, committer, publisher, calls, dispatch_notes, registrations, online, tokens } =
            senders;
        let egress = config.egress.client();
        let (seen, suspensions) = (Arc::new(seen), Arc::<Suspensions>::default());
        let audiences = Arc::new(Audiences::new(core.clone()));
        let node_kinds = NodeKinds::new(core.clone());
        let tokens = Tokens::new(core.clone(), tokens);
        let limits = Arc::new(Limits::new(config.limits));
        let quotas = QuotaCache::new(core.clone(), config.limits.plans);
        let mailboxes = Mailboxes {
            core: core.clone(),
            stream: stream.clone(),
            cursors: Arc::<CursorMoves>::default(),
            claim_waits: Arc::default(),
            unread: UnreadCache::default(),
        };
        let agents = Agents {
            core: core.clone(),
            tokens: tokens.clone(),
            quotas: quotas.clone(),
            mailboxes: mailboxes.clone(),
            seen: Arc::clone(&seen),
        };
        let channels = Channels { core: core.clone(), quotas: quotas.clone(), agents: agents.clone() };
        let observers = Observers {
            core: core.clone(),
            tokens: tokens.clone(),
            quotas: quotas.clone(),
            suspensions: Arc::clone(&suspensions),
            tasks: tasks.clone(),
            cache: Arc::new(observers),
        };
        let files = Files {
            core: core.clone(),
            suspensions: Arc::clone(&suspensions),
            quotas: quotas.clone(),
            secrets: Arc::clone(&secrets),
            storage: Arc::new(FileStorage::new(&config.files)),
        };
        Self {
            access: Access {
                core: core.clone(),
                tokens: tokens.clone(),
                observers: observers.clone(),
                suspensions: Arc::clone(&suspensions),
                seen,
                limits: Arc::clone(&limits),
            },
            actions: Actions {
                core: core.clone(),
                agents: agents.clone(),
                channels: channels.clone(),
                node_kinds: node_kinds.clone(),
                calls: Arc::new(calls),
                dispatch_notes: Arc::new(dispatch_notes),
                schemas: Arc::default(),
                trigger_patterns: TriggerPatterns::default(),
            },
            events: Events {
                core: core.clone(),
                stream: stream.clone(),
                // The cache of `Messages`, so that a hint about members invalidates it once.
                audiences: Arc::clone(&audiences),
                feeds: Arc::default(),
                large_frames: events::large_frames(),
            },
            messages: Messages {
                core: core.clone(),
                quotas: quotas.clone(),
                files: files.clone(),
                suspensions: Arc::clone(&suspensions),
                audiences,
                channels: channels.clone(),
                stream: stream.clone(),
                committer: Arc::new(committer),
            },
            nodes: Nodes {
                core: core.clone(),
                tokens: tokens.clone(),
                quotas: quotas.clone(),
                agents: agents.clone(),
                secrets: Arc::clone(&secrets),
                egress: egress.clone(),
                stream: stream.clone(),
                heartbeats: Arc::default(),
                registrations: Arc::new(registrations),
                online: Arc::new(online),
            },
            processes: Processes { core: core.clone(), stream: stream.clone(), tasks: tasks.clone() },
            rate_limits: RateLimits { core: core.clone(), quotas: quotas.clone(), limits },
            recovery: Recovery {
                core: core.clone(),
                state: Arc::new(RecoveryState::new(config.restore_margin, &core.store)),
            },
            search: Search { core: core.clone() },
            subscriptions: Subscriptions {
                core: core.clone(),
                quotas: quotas.clone(),
                secrets: Arc::clone(&secrets),
                egress: egress.clone(),
            },
            workspaces: Workspaces {
                core: core.clone(),
                tokens,
                secrets: Arc::clone(&secrets),
                observers: observers.clone(),
                quotas: quotas.clone(),
                default_plan: config.limits.default_plan,
            },
            stream,
            tasks,
            core,
            secrets,
            egress,
            publisher,
            due_work: DueWork::default(),
            node_kinds,
            suspensions,
            agents,
            channels,
            files,
            mailboxes,
            observers,
            quotas,
        }
    }
}
