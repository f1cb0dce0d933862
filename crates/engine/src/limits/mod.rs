//! Request budgets: whether a request may go on, before anything is done for it.
//!
//! A request is charged twice: to its caller's part of the workspace's budget, then to the workspace. Both
//! are leased from Postgres in batches (`relay_domain::rate`), so that they hold across gateways and a
//! request costs no round trip. How fast one caller may spend its part is a GCRA of this process alone.

mod account;
mod address;
mod quotas;

use std::{sync::Arc, time::Duration};

use moka::{future, sync};
use relay_domain::{
    AgentId, NodeId, WebhookId, WorkspaceId, WorkspaceScope, metric_names as name,
    plan::Plans,
    rate::{self, Bucket, Family},
};

use self::account::{Account, Spent};
pub use self::quotas::Quotas;
use crate::{Engine, auth::Credential, observers::ObserverAccess};

/// Budgets remembered at once; further ones push out the least used, which then begin their minute anew.
const ACCOUNTS: u64 = 200_000;
/// A budget that nobody has used for this long has begun a new minute anyway.
const ACCOUNT_IDLE: Duration = Duration::from_secs(120);
/// Workspaces whose quotas are remembered at once.
const QUOTAS: u64 = 100_000;
/// Quotas that were changed elsewhere count after this long, if the hint was lost.
const QUOTAS_FOR: Duration = Duration::from_secs(60);

/// What is limited.
#[derive(Debug, Clone, Copy, Default)]
pub struct LimitsConfig {
    /// Whether requests are counted at all. Ceilings always hold.
    pub requests: bool,
    /// What each plan allows.
    pub plans: Plans,
}

/// Who makes a request, as far as budgets go. Survives the rotation of a token.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Holder {
    /// Whoever holds the workspace's key.
    Key,
    /// An agent.
    Agent(AgentId),
    /// A node.
    Node(NodeId),
    /// An inbound webhook.
    Webhook(WebhookId),
    /// An observer token, by its id.
    Observer(Arc<str>),
}

impl Credential {
    /// Who spends, when a request with this credential is charged.
    #[must_use]
    pub fn holder(&self) -> Holder {
        match self {
            Self::Workspace { .. } => Holder::Key,
            Self::Agent(agent) => Holder::Agent(agent.agent_id),
            Self::Node(node) => Holder::Node(node.node_id.clone()),
            Self::Observer(observer) => observer.holder(),
        }
    }
}

impl ObserverAccess {
    /// Who spends, when a request of this observer is charged.
    #[must_use]
    pub fn holder(&self) -> Holder {
        self.token_id.as_ref().map_or(Holder::Key, |id| Holder::Observer(id.to_string().into()))
    }
}

/// How a budget stands, for the headers of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Requests of this kind in one minute.
    pub limit: u32,
    /// How many more may come in this minute, as far as this gateway knows.
    pub remaining: u32,
    /// When the minute ends, in unix seconds.
    pub reset_at: i64,
}

/// Whether a request may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It may.
    Admitted(Standing),
    /// It may not.
    Refused {
        /// How the budget stands.
        standing: Standing,
        /// When to come back, in seconds: 1 to 60.
        retry_after: u16,
    },
    /// Storage does not say what is left of the budget: nothing is wrong with the caller.
    Unknown,
}

pub(crate) struct Limits {
    config: LimitsConfig,
    quotas: future::Cache<WorkspaceId, Quotas>,
    accounts: sync::Cache<(WorkspaceId, Bucket, Option<Holder>), Arc<Account>>,
    addresses: address::Addresses,
}

impl Limits {
    pub(crate) fn new(config: LimitsConfig) -> Self {
        Self {
            config,
            quotas: future::Cache::builder().max_capacity(QUOTAS).time_to_live(QUOTAS_FOR).build(),
            accounts: sync::Cache::builder().max_capacity(ACCOUNTS).time_to_idle(ACCOUNT_IDLE).build(),
            addresses: address::Addresses::default(),
        }
    }
}

impl Engine {
    /// Charges a request of `holder`. `None` when requests are not limited, or when storage is away and
    /// nothing is known of the workspace: then storage refuses the request by itself.
    pub async fn admit(&self, scope: WorkspaceScope, holder: Holder, family: Family) -> Option<Admission> {
        let limits = &self.inner.limits;
        if !limits.config.requests {
            return None;
        }
        let budget = family.bucket().budget(self.quotas(scope).await.ok()?.limits.requests_per_minute);
        let share = rate::share_of_one(budget);
        let own = self.account(scope, family.bucket(), Some(holder), share);
        let all = self.account(scope, family.bucket(), None, budget);
        let (cost, now) = (family.cost(), self.now().timestamp());

        let (refused_by, wait) = match own.spend(self, share, cost).await {
            Spent::Yes => match all.spend(self, budget, cost).await {
                Spent::Yes => (None, None),
                Spent::No { wait } => {
                    own.refund(cost);
                    (Some("workspace"), wait)
                }
                Spent::Unknown => {
                    own.refund(cost);
                    return Some(Admission::Unknown);
                }
            },
            Spent::No { wait } => (Some("caller"), wait),
            Spent::Unknown => return Some(Admission::Unknown),
        };
        let (_, reset_at) = rate::window(scope.workspace_id().get(), now);
        let limit = budget / cost;
        let Some(refused_by) = refused_by else {
            let remaining = own.remaining().min(all.remaining()) / cost;
            return Some(Admission::Admitted(Standing { limit, remaining, reset_at }));
        };
        metrics::counter!(name::REQUESTS_LIMITED, "by" => refused_by).increment(1);
        let seconds =
            wait.map_or(reset_at - now, |wait| wait.as_secs().cast_signed() + i64::from(wait.subsec_nanos() > 0));
        let retry_after = u16::try_from(seconds.clamp(1, rate::WINDOW_SECONDS)).unwrap_or(1);
        let reset_at = now + i64::from(retry_after);
        Some(Admission::Refused { standing: Standing { limit, remaining: 0, reset_at }, retry_after })
    }

    fn account(&self, scope: WorkspaceScope, bucket: Bucket, holder: Option<Holder>, budget: u32) -> Arc<Account> {
        let key = (scope.workspace_id(), bucket, holder);
        self.inner.limits.accounts.get_with_by_ref(&key, || {
            let name = account_name(bucket, key.2.as_ref());
            let (minute, _) = rate::window(scope.workspace_id().get(), self.now().timestamp());
            Arc::new(Account::new(scope, name, budget, minute, key.2.is_some()))
        })
    }
}

/// What storage calls an account.
fn account_name(bucket: Bucket, holder: Option<&Holder>) -> String {
    let bucket = bucket.as_str();
    match holder {
        None => bucket.to_owned(),
        Some(Holder::Key) => format!("{bucket}:key"),
        Some(Holder::Agent(agent)) => format!("{bucket}:agent:{agent}"),
        Some(Holder::Node(node)) => format!("{bucket}:node:{node}"),
        Some(Holder::Webhook(webhook)) => format!("{bucket}:webhook:{webhook}"),
        Some(Holder::Observer(id)) => format!("{bucket}:observer:{id}"),
    }
}
