//! The host: starts programs in terminals, and owns their tasks and what they share.

use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::Interest,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
    task::{JoinSet, spawn_blocking},
    time::Instant,
};

use crate::{
    EndReport, HostSettings, Leftover, ProcessIdentity, PtyError, SpawnRequest, Terminal, TreeUsage,
    driver::{Driver, EventSender},
    input::InputQueue,
    linux::{self, RootProcess},
    output::OutputBudget,
    screen::Screen,
    terminal::{Display, EventStream, Shared, lock},
    tree::{Selection, Tree, Trees, run_reaper},
};

/// Events of one terminal that wait for its consumer: half a MiB of output. Beyond it output waits in the terminal, so
/// that one slow consumer cannot take up the bound of all.
const EVENTS: usize = 16;

/// True while this process has a host. Two hosts would take each other's programs for orphans.
static HOSTING: AtomicBool = AtomicBool::new(false);

/// Starts programs in terminals. Clones are the same host.
///
/// A process has at most one host: it adopts the orphans of all its descendants. Children that the process starts by
/// other means must stay in its session, or [`PtyHost::shutdown`] takes them for orphans of terminals.
///
/// Dropping the last clone closes all terminals, which hangs up their programs. [`PtyHost::shutdown`] ends them.
#[derive(Clone)]
pub struct PtyHost {
    inner: Arc<Inner>,
}

struct Inner {
    settings: HostSettings,
    profile: Arc<crate::TerminalProfile>,
    budget: OutputBudget,
    trees: Arc<Trees>,
    /// One program is started at a time, so that at most one thread is busy with it. True once the host shuts down.
    stopping: tokio::sync::Mutex<bool>,
    tasks: Mutex<JoinSet<()>>,
    _only: OnlyHost,
}

impl PtyHost {
    /// Prepares this process for hosting terminals. Must be called on a Tokio runtime with I/O and time.
    pub fn new(settings: HostSettings) -> Result<Self, PtyError> {
        let only = OnlyHost::claim()?;
        linux::become_subreaper().map_err(PtyError::PrepareHost)?;
        // Also replaces an ignored SIGCHLD, with which the kernel would discard exit statuses.
        let children = signal(SignalKind::child()).map_err(PtyError::PrepareHost)?;
        let trees = Arc::new(Trees::new(settings.marker_variable.clone()));
        let mut tasks = JoinSet::new();
        tasks.spawn(run_reaper(trees.clone(), children));
        let inner = Inner {
            profile: Arc::new(settings.profile.clone()),
            budget: OutputBudget::new(settings.limits.undelivered_output_bytes),
            settings,
            trees,
            stopping: tokio::sync::Mutex::new(false),
            tasks: Mutex::new(tasks),
            _only: only,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Starts a program in a terminal of its own. A caller that stops waiting gets the program ended.
    pub async fn spawn(&self, request: SpawnRequest) -> Result<(Terminal, EventStream), PtyError> {
        let (sender, receiver) = oneshot::channel();
        let inner = self.inner.clone();
        // A task of its own: a caller that is cancelled during the start would leave a program without any handle.
        self.inner.run(async move {
            let (claim, claimed) = oneshot::channel();
            let started = inner.start(request).await;
            let terminal = started.as_ref().ok().map(|(terminal, _)| terminal.clone());
            // The claim is dropped with a result that the caller does not take, even if it was sent already.
            let _ = sender.send(started.map(|started| (started, claim)));
            if let (Some(terminal), Err(_)) = (terminal, claimed.await)
                && let Err(error) = terminal.end(Duration::ZERO).await
            {
                tracing::warn!(%error, "ending a program after its caller stopped waiting failed, the program may still run");
            }
        });
        let (started, claim) = receiver.await.unwrap_or(Err(PtyError::ShuttingDown))?;
        // Fails if the runtime has dropped the task; the terminal's task was dropped with it.
        let _ = claim.send(());
        Ok(started)
    }

    /// Resources of every running terminal's processes, from one scan of the process table.
    pub async fn usage(&self) -> Result<HashMap<ProcessIdentity, TreeUsage>, PtyError> {
        self.inner.trees.all_usage().await
    }

    /// Bytes of output that were read and not yet dropped by consumers.
    pub fn undelivered_output_bytes(&self) -> usize {
        self.inner.budget.used()
    }

    /// Ends what an earlier process left behind: its programs and everything that carries their markers.
    pub async fn end_leftovers(&self, leftovers: &[Leftover], grace: Duration) -> Result<EndReport, PtyError> {
        let trees: Vec<Tree> =
            leftovers.iter().map(|leftover| Tree::new(leftover.root, leftover.marker.clone())).collect();
        self.inner.trees.end(&Selection::Leftovers(&trees), Instant::now() + grace).await
    }

    /// Ends all terminals together and every orphan of theirs, and starts no more. After it, no process that descends
    /// from a terminal is left, except those in the report.
    pub async fn shutdown(&self, grace: Duration) -> Result<EndReport, PtyError> {
        // Waits for a start that is in progress, so that its terminal is among the running ones below.
        *self.inner.stopping.lock().await = true;
        let deadline = Instant::now() + grace;
        let mut ends = JoinSet::new();
        for shared in self.inner.trees.running() {
            shared.queue.close();
            let trees = self.inner.trees.clone();
            ends.spawn(async move { trees.end_terminal(&shared, grace).await });
        }
        // At the same time as the terminals above, so that all of them share one grace.
        let mut reports = vec![self.inner.trees.end(&Selection::Orphans, deadline).await];
        while let Some(ended) = ends.join_next().await {
            reports.push(ended.unwrap_or_else(|failed| Err(PtyError::ProcessTable(io::Error::other(failed)))));
        }
        // Orphans that the end of their parents has made.
        let last = self.inner.trees.end(&Selection::Orphans, Instant::now()).await;
        // Errors count only now: a return before this line would abort the ends of the other terminals.
        let mut killed = 0;
        for report in reports {
            killed += report?.killed;
        }
        let last = last?;
        let running = self.inner.trees.running();
        let unfinished = running.iter().filter(|shared| shared.exit().is_none()).map(|shared| shared.tree.root.pid);
        let survivors = last.survivors.into_iter().chain(unfinished).collect();
        Ok(EndReport { exit: None, killed: killed + last.killed, survivors })
    }
}

impl Inner {
    async fn start(&self, request: SpawnRequest) -> Result<(Terminal, EventStream), PtyError> {
        let stopping = self.stopping.lock().await;
        if *stopping {
            return Err(PtyError::ShuttingDown);
        }
        let (size, marker) = (request.size, request.marker.clone());
        let marker_variable = self.settings.marker_variable.clone();
        let started = spawn_blocking(move || {
            let (master, program_side) = linux::open(size).map_err(PtyError::OpenTerminal)?;
            let root = linux::start(&request, &marker_variable, program_side)?;
            Ok((master, root))
        });
        let (master, root): (OwnedFd, RootProcess) =
            started.await.unwrap_or_else(|failed| Err(PtyError::PrepareHost(io::Error::other(failed))))?;
        let root = Arc::new(root);
        let interest = Interest::READABLE | Interest::WRITABLE;
        let master = Arc::new(linux::register(master, interest).map_err(PtyError::OpenTerminal)?);
        let display = Display { screen: Screen::new(size, self.profile.clone()), master: Some(master.clone()) };
        let tree = Tree::new(root.identity, marker);
        let shared = Arc::new(Shared::new(tree, InputQueue::new(&self.settings.limits), display, root.clone()));
        self.trees.insert(shared.clone());
        let (sender, receiver) = mpsc::channel(EVENTS);
        let events = EventSender::new(sender, self.budget.clone());
        let driver = Driver::new(shared.clone(), root, master, events, self.settings.limits.write_stall);
        let registration = Registration { trees: self.trees.clone(), shared: shared.clone() };
        self.run(async move {
            // The task owns the registration, so that a panic or an abort of the driver removes the terminal as well.
            driver.run().await;
            drop(registration);
        });
        Ok((Terminal { shared, trees: self.trees.clone() }, EventStream(receiver)))
    }

    /// Runs a task that ends with the host.
    fn run(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        // Ended tasks are removed here; otherwise the set would grow with each terminal ever started.
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a terminal's task failed, its events have ended");
            }
        }
        tasks.spawn(task);
    }
}

/// The claim to be the process's host.
struct OnlyHost;

impl OnlyHost {
    fn claim() -> Result<Self, PtyError> {
        if HOSTING.swap(true, Ordering::SeqCst) { Err(PtyError::AlreadyHosting) } else { Ok(Self) }
    }
}

impl Drop for OnlyHost {
    fn drop(&mut self) {
        HOSTING.store(false, Ordering::SeqCst);
    }
}

/// Place of a terminal among the running ones, until its task ends in any way.
struct Registration {
    trees: Arc<Trees>,
    shared: Arc<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A driver that was aborted has not closed it; callers that wait for their writes would wait for ever.
        self.shared.queue.close();
        self.trees.remove(self.shared.tree.root);
    }
}
