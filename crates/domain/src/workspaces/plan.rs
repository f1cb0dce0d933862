//! Plans, their limits, and overrides of the limits for a single workspace.

use serde::{Deserialize, Serialize};

/// Named set of limits.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Plan {
    /// Plan with the lowest limits.
    Free,
    /// Plan with medium limits.
    Pro,
    /// Plan with no quota but that of child workspaces.
    #[default]
    Enterprise,
}

crate::columns::stored_name!(Plan);

/// Resource with a quota per workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quota {
    /// Agents that are not deleted.
    Agents,
    /// Channels, including archived ones because their names stay reserved. Conversations do not count.
    Channels,
    /// Enrolled nodes. Implicit direct nodes of agents do not count.
    Nodes,
    /// Inbound webhooks.
    Webhooks,
    /// Event subscriptions.
    Subscriptions,
    /// Observer tokens that are not revoked.
    ObserverTokens,
    /// Total size of all files, in bytes.
    FileBytes,
    /// Workspaces created with the key of this one, or with that of a workspace that counts against it.
    ChildWorkspaces,
}

impl Quota {
    /// Returns the resource name for error messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Channels => "channels",
            Self::Nodes => "nodes",
            Self::Webhooks => "webhooks",
            Self::Subscriptions => "subscriptions",
            Self::ObserverTokens => "observer tokens",
            Self::FileBytes => "bytes of files",
            Self::ChildWorkspaces => "child workspaces",
        }
    }
}

/// Limits of a workspace. A quota of `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanLimits {
    /// Requests per minute over all gateways.
    pub requests_per_minute: u32,
    /// Quota of [`Quota::Agents`].
    pub agents: Option<u32>,
    /// Quota of [`Quota::Channels`].
    pub channels: Option<u32>,
    /// Quota of [`Quota::Nodes`].
    pub nodes: Option<u32>,
    /// Quota of [`Quota::Webhooks`].
    pub webhooks: Option<u32>,
    /// Quota of [`Quota::Subscriptions`].
    pub subscriptions: Option<u32>,
    /// Quota of [`Quota::ObserverTokens`].
    pub observer_tokens: Option<u32>,
    /// Quota of [`Quota::FileBytes`].
    pub file_bytes: Option<i64>,
    /// Quota of [`Quota::ChildWorkspaces`].
    pub child_workspaces: Option<u32>,
    /// Maximum number of unsettled deliveries in one mailbox.
    pub mailbox_depth: u32,
    /// Retention of messages in days besides today, if shorter than that of the installation.
    pub message_days: Option<u32>,
}

impl PlanLimits {
    /// Returns the maximum for a quota, or `None` if it is unlimited.
    #[must_use]
    pub fn quota(&self, quota: Quota) -> Option<i64> {
        match quota {
            Quota::Agents => self.agents.map(i64::from),
            Quota::Channels => self.channels.map(i64::from),
            Quota::Nodes => self.nodes.map(i64::from),
            Quota::Webhooks => self.webhooks.map(i64::from),
            Quota::Subscriptions => self.subscriptions.map(i64::from),
            Quota::ObserverTokens => self.observer_tokens.map(i64::from),
            Quota::FileBytes => self.file_bytes,
            Quota::ChildWorkspaces => self.child_workspaces.map(i64::from),
        }
    }

    /// Returns these limits with the given overrides applied.
    #[must_use]
    pub fn with_overrides(self, own: &LimitOverrides) -> Self {
        Self {
            requests_per_minute: own.requests_per_minute.unwrap_or(self.requests_per_minute),
            agents: own.agents.or(self.agents),
            channels: own.channels.or(self.channels),
            nodes: own.nodes.or(self.nodes),
            webhooks: own.webhooks.or(self.webhooks),
            subscriptions: own.subscriptions.or(self.subscriptions),
            observer_tokens: own.observer_tokens.or(self.observer_tokens),
            file_bytes: own.file_bytes.or(self.file_bytes),
            child_workspaces: own.child_workspaces.or(self.child_workspaces),
            mailbox_depth: own.mailbox_depth.unwrap_or(self.mailbox_depth),
            message_days: own.message_days.or(self.message_days),
        }
    }
}

/// Overrides of a plan's limits. `None` keeps the limit of the plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitOverrides {
    /// Override of [`PlanLimits::requests_per_minute`].
    pub requests_per_minute: Option<u32>,
    /// Override of [`Quota::Agents`].
    pub agents: Option<u32>,
    /// Override of [`Quota::Channels`].
    pub channels: Option<u32>,
    /// Override of [`Quota::Nodes`].
    pub nodes: Option<u32>,
    /// Override of [`Quota::Webhooks`].
    pub webhooks: Option<u32>,
    /// Override of [`Quota::Subscriptions`].
    pub subscriptions: Option<u32>,
    /// Override of [`Quota::ObserverTokens`].
    pub observer_tokens: Option<u32>,
    /// Override of [`Quota::FileBytes`].
    pub file_bytes: Option<i64>,
    /// Override of [`Quota::ChildWorkspaces`].
    pub child_workspaces: Option<u32>,
    /// Override of [`PlanLimits::mailbox_depth`].
    pub mailbox_depth: Option<u32>,
    /// Override of [`PlanLimits::message_days`].
    pub message_days: Option<u32>,
}

impl LimitOverrides {
    /// Description of the ranges that [`Self::is_valid`] checks, for error messages.
    pub const VALID_RANGES: &str = "requests_per_minute must be between 10 and 1000000, mailbox_depth between 1 and 100000, \
                              message_days between 8 and 36500, file_bytes not negative";

    /// Returns whether every value is within its range.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.requests_per_minute.is_none_or(|budget| REQUESTS_PER_MINUTE.contains(&budget))
            && self.file_bytes.is_none_or(|bytes| bytes >= 0)
            && self.mailbox_depth.is_none_or(|depth| MAILBOX_DEPTH.contains(&depth))
            && self.message_days.is_none_or(|days| MESSAGE_DAYS.contains(&days))
    }
}

/// Valid range of requests per minute. Below 10 a single message would exceed the limit; above a million the arithmetic
/// in [`crate::workspaces::rate_limit`] would overflow 32 bits.
pub const REQUESTS_PER_MINUTE: std::ops::RangeInclusive<u32> = 10..=1_000_000;

/// Valid range of the mailbox depth. Resuming a mailbox and every expiry scan read its unsettled rows.
pub const MAILBOX_DEPTH: std::ops::RangeInclusive<u32> = 1..=100_000;

/// Valid range of the message retention in days. The minimum covers every message that a delivery may refer to.
pub const MESSAGE_DAYS: std::ops::RangeInclusive<u32> = 8..=36_500;

/// Limits of every plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plans {
    free: PlanLimits,
    pro: PlanLimits,
    enterprise: PlanLimits,
}

const GIB: i64 = 1024 * 1024 * 1024;
/// Default mailbox depth of every plan.
const DEPTH: u32 = 1000;

impl Default for Plans {
    fn default() -> Self {
        let free = PlanLimits {
            requests_per_minute: 300,
            agents: Some(50),
            channels: Some(50),
            nodes: Some(5),
            webhooks: Some(10),
            subscriptions: Some(10),
            observer_tokens: Some(10),
            file_bytes: Some(GIB),
            child_workspaces: Some(3),
            mailbox_depth: DEPTH,
            message_days: None,
        };
        let pro = PlanLimits {
            requests_per_minute: 6000,
            agents: Some(1000),
            channels: Some(1000),
            nodes: Some(100),
            webhooks: Some(100),
            subscriptions: Some(100),
            observer_tokens: Some(100),
            file_bytes: Some(100 * GIB),
            child_workspaces: Some(100),
            mailbox_depth: DEPTH,
            message_days: None,
        };
        let enterprise = PlanLimits {
            requests_per_minute: 30_000,
            agents: None,
            channels: None,
            nodes: None,
            webhooks: None,
            subscriptions: None,
            observer_tokens: None,
            file_bytes: None,
            // Each has rate limits of its own, so that a workspace without a bound on them would have no rate limit.
            child_workspaces: Some(1000),
            mailbox_depth: DEPTH,
            message_days: None,
        };
        Self { free, pro, enterprise }
    }
}

impl Plans {
    /// Returns the limits of a plan.
    #[must_use]
    pub const fn limits_of(&self, plan: Plan) -> PlanLimits {
        match plan {
            Plan::Free => self.free,
            Plan::Pro => self.pro,
            Plan::Enterprise => self.enterprise,
        }
    }

    /// Returns the default plans with overrides applied, or `None` when a value is out of range.
    #[must_use]
    pub fn with_overrides(changes: &PlanOverrides) -> Option<Self> {
        let default = Self::default();
        [changes.free, changes.pro, changes.enterprise].iter().all(LimitOverrides::is_valid).then(|| Self {
            free: default.free.with_overrides(&changes.free),
            pro: default.pro.with_overrides(&changes.pro),
            enterprise: default.enterprise.with_overrides(&changes.enterprise),
        })
    }
}

/// Overrides of the default plans by an installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanOverrides {
    pub free: LimitOverrides,
    pub pro: LimitOverrides,
    pub enterprise: LimitOverrides,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_plans_are_overridden_individually() {
        let free = LimitOverrides { agents: Some(3), ..LimitOverrides::default() };
        let enterprise = LimitOverrides {
            requests_per_minute: Some(90_000),
            mailbox_depth: Some(5000),
            ..LimitOverrides::default()
        };
        let plans = Plans::with_overrides(&PlanOverrides { free, enterprise, ..PlanOverrides::default() }).unwrap();
        assert_eq!(
            plans.limits_of(Plan::Free),
            PlanLimits { agents: Some(3), ..Plans::default().limits_of(Plan::Free) }
        );
        assert_eq!(plans.limits_of(Plan::Pro), Plans::default().limits_of(Plan::Pro));
        assert_eq!(plans.limits_of(Plan::Enterprise).requests_per_minute, 90_000);
        assert_eq!(plans.limits_of(Plan::Enterprise).mailbox_depth, 5000);
    }

    #[test]
    fn limits_out_of_range_are_refused() {
        for pro in [
            LimitOverrides { requests_per_minute: Some(0), ..LimitOverrides::default() },
            LimitOverrides { requests_per_minute: Some(1_000_001), ..LimitOverrides::default() },
            LimitOverrides { file_bytes: Some(-1), ..LimitOverrides::default() },
            LimitOverrides { mailbox_depth: Some(0), ..LimitOverrides::default() },
            LimitOverrides { mailbox_depth: Some(100_001), ..LimitOverrides::default() },
            LimitOverrides { message_days: Some(7), ..LimitOverrides::default() },
            LimitOverrides { message_days: Some(36_501), ..LimitOverrides::default() },
        ] {
            assert_eq!(Plans::with_overrides(&PlanOverrides { pro, ..PlanOverrides::default() }), None);
        }
    }

    #[test]
    fn a_plan_has_one_name() {
        for plan in [Plan::Free, Plan::Pro, Plan::Enterprise] {
            assert_eq!(Plan::parse(plan.as_str()), Some(plan));
        }
        assert_eq!(Plan::parse("gold"), None);
    }
}
