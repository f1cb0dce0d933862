//! Rate limits: admission of a request before any work is done for it. Main types: [`RateLimits`], which
//! answers with an [`Admission`], and [`QuotaCache`].
//!
//! A request is charged twice: to its caller's share, then to the workspace. Both are leased from Postgres in batches
//! (`relay_domain::workspaces::rate_limit`), so that they hold across gateways and a request costs no round trip. The
//! pace of one caller is a GCRA of this process.

mod account;
mod address;
mod quotas;
mod unknown_tokens;

use std::{sync::Arc, time::Duration};

use moka::sync;
use relay_domain::{
    AgentId, NodeId, WebhookId, WorkspaceId, WorkspaceScope, metric_names as name,
    workspaces::{
        plan::{Plan, Plans},
        rate_limit::{self, Bucket, RouteClass},
    },
};

use self::account::{Account, ChargeOutcome};
pub use self::quotas::{QuotaCache, Quotas};
use self::unknown_tokens::UnknownTokens;
use crate::{access::callers::Credential, core::Core, observers::access::ObserverAccess};

/// Bound of the accounts; further ones evict the least used, whose minute then starts over.
const MAX_ACCOUNTS: u64 = 200_000;
/// An account unused for this long has started a new minute anyway.
const ACCOUNT_IDLE: Duration = Duration::from_secs(120);

/// Configuration of rate limits and quotas.
#[derive(Debug, Clone, Copy, Default)]
pub struct LimitsConfig {
    /// True if requests are limited. Quotas always apply.
    pub requests: bool,
    pub plans: Plans,
    /// Plan of workspaces that are created without a workspace key.
    pub default_plan: Plan,
}

/// Caller of a request for rate limits. Stays the same when its token is rotated.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RateLimitSubject {
    Key,
    Agent(AgentId),
    Node(NodeId),
    Webhook(WebhookId),
    Observer(Arc<str>),
}

impl Credential {
    /// Returns the account that pays for requests with this credential.
    #[must_use]
    pub fn rate_limit_subject(&self) -> RateLimitSubject {
        match self {
            Self::Workspace { .. } => RateLimitSubject::Key,
            Self::Agent(agent) => RateLimitSubject::Agent(agent.agent_id),
            Self::Node(node) => RateLimitSubject::Node(node.node_id.clone()),
            Self::Observer(observer) => observer.rate_limit_subject(),
        }
    }
}

impl ObserverAccess {
    /// Returns the account that pays for this observer's requests.
    #[must_use]
    pub fn rate_limit_subject(&self) -> RateLimitSubject {
        self.token_id.as_ref().map_or(RateLimitSubject::Key, |id| RateLimitSubject::Observer(id.to_string().into()))
    }
}

/// State of a rate limit, for response headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimitStatus {
    pub limit: u32,
    /// Requests left in this minute, as far as this gateway knows.
    pub remaining: u32,
    /// End of the minute, in unix seconds.
    pub reset_at: i64,
}

/// Outcome of the admission of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Admitted(RateLimitStatus),
    Refused {
        standing: RateLimitStatus,
        /// Seconds until the next attempt: 1 to 60.
        retry_after: u16,
    },
    /// Storage is unavailable, so the limit is unknown: not the caller's fault.
    Unknown,
}

pub(crate) struct Limits {
    config: LimitsConfig,
    accounts: sync::Cache<(WorkspaceId, Bucket, Option<RateLimitSubject>), Arc<Account>>,
    addresses: address::Addresses,
    unknown_tokens: UnknownTokens,
}

impl Limits {
    pub(crate) fn new(config: LimitsConfig) -> Self {
        Self {
            config,
            accounts: sync::Cache::builder().max_capacity(MAX_ACCOUNTS).time_to_idle(ACCOUNT_IDLE).build(),
            addresses: address::Addresses::default(),
            unknown_tokens: UnknownTokens::default(),
        }
    }

    /// Returns the limit of unknown tokens, if requests are limited.
    pub(in crate::access) fn unknown_tokens(&self) -> Option<&UnknownTokens> {
        self.config.requests.then_some(&self.unknown_tokens)
    }
}

/// Handle of rate limits.
#[derive(Clone)]
pub struct RateLimits {
    pub(crate) core: Core,
    pub(crate) quotas: QuotaCache,
    pub(crate) limits: Arc<Limits>,
}

impl RateLimits {
    /// Charges a request of `subject`. While rate limits are disabled nothing is counted, and the status has the
    /// numbers of the plan. `None` when storage is unavailable and the quotas are not cached: then storage refuses the
    /// request itself.
    pub async fn admit(
        &self,
        scope: WorkspaceScope,
        subject: RateLimitSubject,
        family: RouteClass,
    ) -> Option<Admission> {
        let limits = &self.limits;
        let limit_units =
            family.bucket().units_per_window(self.quotas.load(scope).await.ok()?.limits.requests_per_minute);
        if !limits.config.requests {
            let (_, reset_at) = rate_limit::window_at(scope.workspace_id().get(), self.core.now().timestamp());
            let limit = limit_units / family.cost();
            return Some(Admission::Admitted(RateLimitStatus { limit, remaining: limit, reset_at }));
        }
        let share = rate_limit::caller_share(limit_units);
        let own = self.account(scope, family.bucket(), Some(subject), share);
        let all = self.account(scope, family.bucket(), None, limit_units);
        let (cost, now) = (family.cost(), self.core.now().timestamp());

        // The caller's share first: a caller that has used it up takes nothing from the others of its workspace.
        let (refused_by, wait) = match own.spend(&self.core, share, cost).await {
            ChargeOutcome::Yes => match all.spend(&self.core, limit_units, cost).await {
                ChargeOutcome::Yes => (None, None),
                ChargeOutcome::No { wait } => {
                    // The request was not served, so it must not count against its caller.
                    own.refund(cost);
                    (Some("workspace"), wait)
                }
                ChargeOutcome::Unknown => {
                    own.refund(cost);
                    return Some(Admission::Unknown);
                }
            },
            ChargeOutcome::No { wait } => (Some("caller"), wait),
            ChargeOutcome::Unknown => return Some(Admission::Unknown),
        };
        let (_, reset_at) = rate_limit::window_at(scope.workspace_id().get(), now);
        let limit = limit_units / cost;
        let Some(refused_by) = refused_by else {
            // The next request has to pass both.
            let remaining = own.remaining().min(all.remaining()) / cost;
            return Some(Admission::Admitted(RateLimitStatus { limit, remaining, reset_at }));
        };
        metrics::counter!(name::REQUESTS_LIMITED, "by" => refused_by).increment(1);
        let seconds =
            wait.map_or(reset_at - now, |wait| wait.as_secs().cast_signed() + i64::from(wait.subsec_nanos() > 0));
        let retry_after = u16::try_from(seconds.clamp(1, rate_limit::WINDOW_SECONDS)).unwrap_or(1);
        let reset_at = now + i64::from(retry_after);
        Some(Admission::Refused { standing: RateLimitStatus { limit, remaining: 0, reset_at }, retry_after })
    }

    fn account(
        &self,
        scope: WorkspaceScope,
        bucket: Bucket,
        subject: Option<RateLimitSubject>,
        limit_units: u32,
    ) -> Arc<Account> {
        let key = (scope.workspace_id(), bucket, subject);
        // Concurrent first requests get one account: with two, the units that may be spent before any are acquired
        // would count twice.
        self.limits.accounts.get_with_by_ref(&key, || {
            let name = account_name(bucket, key.2.as_ref());
            let (minute, _) = rate_limit::window_at(scope.workspace_id().get(), self.core.now().timestamp());
            Arc::new(Account::new(scope, name, limit_units, minute, key.2.is_some()))
        })
    }
}

/// Name of an account in storage.
fn account_name(bucket: Bucket, subject: Option<&RateLimitSubject>) -> String {
    let bucket = bucket.as_str();
    match subject {
        None => bucket.to_owned(),
        Some(RateLimitSubject::Key) => format!("{bucket}:key"),
        Some(RateLimitSubject::Agent(agent)) => format!("{bucket}:agent:{agent}"),
        Some(RateLimitSubject::Node(node)) => format!("{bucket}:node:{node}"),
        Some(RateLimitSubject::Webhook(webhook)) => format!("{bucket}:webhook:{webhook}"),
        Some(RateLimitSubject::Observer(id)) => format!("{bucket}:observer:{id}"),
    }
}
