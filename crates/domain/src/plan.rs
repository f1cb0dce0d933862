//! What a workspace may use: its plan, the plan's limits, and what an operator sets apart from it.

use serde::{Deserialize, Serialize};

/// What a workspace is entitled to, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plan {
    /// The smallest.
    Free,
    /// In between.
    Pro,
    /// The largest, and what a new workspace has.
    Enterprise,
}

impl Plan {
    /// Its name on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Pro => "pro",
            Self::Enterprise => "enterprise",
        }
    }

    /// The plan of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Free, Self::Pro, Self::Enterprise].into_iter().find(|plan| plan.as_str() == name)
    }
}

/// Things of which a workspace may have so many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ceiling {
    /// Living agents.
    Agents,
    /// Channels, archived ones included: their names stay taken. Conversations do not count.
    Channels,
    /// Enrolled nodes. The agents' own direct nodes do not count.
    Nodes,
    /// Inbound webhooks.
    Webhooks,
    /// Event subscriptions.
    Subscriptions,
    /// Observer tokens that are not revoked.
    ObserverTokens,
    /// Bytes of all files together.
    FileBytes,
}

impl Ceiling {
    /// For the message of a refusal.
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
        }
    }
}

/// What a workspace may use. A ceiling of `None` is no ceiling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Requests in one minute, all gateways together.
    pub requests_per_minute: u32,
    /// See [`Ceiling::Agents`].
    pub agents: Option<u32>,
    /// See [`Ceiling::Channels`].
    pub channels: Option<u32>,
    /// See [`Ceiling::Nodes`].
    pub nodes: Option<u32>,
    /// See [`Ceiling::Webhooks`].
    pub webhooks: Option<u32>,
    /// See [`Ceiling::Subscriptions`].
    pub subscriptions: Option<u32>,
    /// See [`Ceiling::ObserverTokens`].
    pub observer_tokens: Option<u32>,
    /// See [`Ceiling::FileBytes`].
    pub file_bytes: Option<i64>,
    /// Unsettled deliveries that one mailbox takes.
    pub mailbox_depth: u32,
    /// Days of messages besides today, if fewer than the installation keeps.
    pub message_days: Option<u32>,
}

impl Limits {
    /// How many of `ceiling` there may be.
    #[must_use]
    pub fn of(&self, ceiling: Ceiling) -> Option<i64> {
        match ceiling {
            Ceiling::Agents => self.agents.map(i64::from),
            Ceiling::Channels => self.channels.map(i64::from),
            Ceiling::Nodes => self.nodes.map(i64::from),
            Ceiling::Webhooks => self.webhooks.map(i64::from),
            Ceiling::Subscriptions => self.subscriptions.map(i64::from),
            Ceiling::ObserverTokens => self.observer_tokens.map(i64::from),
            Ceiling::FileBytes => self.file_bytes,
        }
    }

    /// These, with what `own` says instead.
    #[must_use]
    pub fn with(self, own: &OwnLimits) -> Self {
        Self {
            requests_per_minute: own.requests_per_minute.unwrap_or(self.requests_per_minute),
            agents: own.agents.or(self.agents),
            channels: own.channels.or(self.channels),
            nodes: own.nodes.or(self.nodes),
            webhooks: own.webhooks.or(self.webhooks),
            subscriptions: own.subscriptions.or(self.subscriptions),
            observer_tokens: own.observer_tokens.or(self.observer_tokens),
            file_bytes: own.file_bytes.or(self.file_bytes),
            mailbox_depth: own.mailbox_depth.unwrap_or(self.mailbox_depth),
            message_days: own.message_days.or(self.message_days),
        }
    }
}

/// Limits apart from a plan's. What is `None` is as the plan says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OwnLimits {
    /// Requests in one minute.
    pub requests_per_minute: Option<u32>,
    /// See [`Ceiling::Agents`].
    pub agents: Option<u32>,
    /// See [`Ceiling::Channels`].
    pub channels: Option<u32>,
    /// See [`Ceiling::Nodes`].
    pub nodes: Option<u32>,
    /// See [`Ceiling::Webhooks`].
    pub webhooks: Option<u32>,
    /// See [`Ceiling::Subscriptions`].
    pub subscriptions: Option<u32>,
    /// See [`Ceiling::ObserverTokens`].
    pub observer_tokens: Option<u32>,
    /// See [`Ceiling::FileBytes`].
    pub file_bytes: Option<i64>,
    /// Unsettled deliveries that one mailbox takes.
    pub mailbox_depth: Option<u32>,
    /// Days of messages besides today.
    pub message_days: Option<u32>,
}

impl OwnLimits {
    /// What [`Self::is_usable`] wants, for people.
    pub const USABLE: &str = "requests_per_minute must be between 10 and 1000000, mailbox_depth between 1 and 100000, \
                              message_days between 8 and 36500, file_bytes not negative";

    /// Whether every number can be used: it is in its range.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.requests_per_minute.is_none_or(|budget| REQUESTS_PER_MINUTE.contains(&budget))
            && self.file_bytes.is_none_or(|bytes| bytes >= 0)
            && self.mailbox_depth.is_none_or(|depth| MAILBOX_DEPTH.contains(&depth))
            && self.message_days.is_none_or(|days| MESSAGE_DAYS.contains(&days))
    }
}

/// What a request budget may be: below 10 one message would not fit, above a million the arithmetic in
/// [`crate::rate`] would leave 32 bits.
pub const REQUESTS_PER_MINUTE: std::ops::RangeInclusive<u32> = 10..=1_000_000;

/// How deep a mailbox may be. Resuming one, and each look for what expires, reads what is unsettled in it.
pub const MAILBOX_DEPTH: std::ops::RangeInclusive<u32> = 1..=100_000;

/// How many days of messages may be kept: those that deliveries refer to at least.
pub const MESSAGE_DAYS: std::ops::RangeInclusive<u32> = 8..=36_500;

/// The limits of every plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plans {
    free: Limits,
    pro: Limits,
    enterprise: Limits,
}

const GIB: i64 = 1024 * 1024 * 1024;
/// How deep mailboxes are on every plan, unless the installation says something else.
const DEPTH: u32 = 1000;

impl Default for Plans {
    fn default() -> Self {
        let free = Limits {
            requests_per_minute: 300,
            agents: Some(50),
            channels: Some(50),
            nodes: Some(5),
            webhooks: Some(10),
            subscriptions: Some(10),
            observer_tokens: Some(10),
            file_bytes: Some(GIB),
            mailbox_depth: DEPTH,
            message_days: None,
        };
        let pro = Limits {
            requests_per_minute: 6000,
            agents: Some(1000),
            channels: Some(1000),
            nodes: Some(100),
            webhooks: Some(100),
            subscriptions: Some(100),
            observer_tokens: Some(100),
            file_bytes: Some(100 * GIB),
            mailbox_depth: DEPTH,
            message_days: None,
        };
        let enterprise = Limits {
            requests_per_minute: 30_000,
            agents: None,
            channels: None,
            nodes: None,
            webhooks: None,
            subscriptions: None,
            observer_tokens: None,
            file_bytes: None,
            mailbox_depth: DEPTH,
            message_days: None,
        };
        Self { free, pro, enterprise }
    }
}

impl Plans {
    /// The limits of a plan.
    #[must_use]
    pub const fn of(&self, plan: Plan) -> Limits {
        match plan {
            Plan::Free => self.free,
            Plan::Pro => self.pro,
            Plan::Enterprise => self.enterprise,
        }
    }

    /// The default plans with some numbers changed. `None` when a number cannot be used.
    #[must_use]
    pub fn changed(changes: &PlanChanges) -> Option<Self> {
        let default = Self::default();
        [changes.free, changes.pro, changes.enterprise].iter().all(OwnLimits::is_usable).then(|| Self {
            free: default.free.with(&changes.free),
            pro: default.pro.with(&changes.pro),
            enterprise: default.enterprise.with(&changes.enterprise),
        })
    }
}

/// What an installation changes of the default plans.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanChanges {
    /// Of the smallest plan.
    pub free: OwnLimits,
    /// Of the middle one.
    pub pro: OwnLimits,
    /// Of the largest.
    pub enterprise: OwnLimits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_changed_number_by_number() {
        let free = OwnLimits { agents: Some(3), ..OwnLimits::default() };
        let enterprise =
            OwnLimits { requests_per_minute: Some(90_000), mailbox_depth: Some(5000), ..OwnLimits::default() };
        let plans = Plans::changed(&PlanChanges { free, enterprise, ..PlanChanges::default() }).unwrap();
        assert_eq!(plans.of(Plan::Free), Limits { agents: Some(3), ..Plans::default().of(Plan::Free) });
        assert_eq!(plans.of(Plan::Pro), Plans::default().of(Plan::Pro));
        assert_eq!(plans.of(Plan::Enterprise).requests_per_minute, 90_000);
        assert_eq!(plans.of(Plan::Enterprise).mailbox_depth, 5000);
    }

    #[test]
    fn numbers_that_cannot_be_used_are_refused() {
        for pro in [
            OwnLimits { requests_per_minute: Some(0), ..OwnLimits::default() },
            OwnLimits { requests_per_minute: Some(1_000_001), ..OwnLimits::default() },
            OwnLimits { file_bytes: Some(-1), ..OwnLimits::default() },
            OwnLimits { mailbox_depth: Some(0), ..OwnLimits::default() },
            OwnLimits { mailbox_depth: Some(100_001), ..OwnLimits::default() },
            OwnLimits { message_days: Some(7), ..OwnLimits::default() },
            OwnLimits { message_days: Some(36_501), ..OwnLimits::default() },
        ] {
            assert_eq!(Plans::changed(&PlanChanges { pro, ..PlanChanges::default() }), None);
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
