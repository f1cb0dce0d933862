//! Check of replication: what a failover of Postgres loses (docs/operations/failover.md).

use relay_store::admin::DatabaseHealth;

use super::{Finding, Verdict};

/// Guarantee for an accepted message when the primary is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guarantee {
    /// No standby: everything since the last backup is lost.
    Single,
    /// A failover loses the commits that the standby did not have yet.
    Asynchronous,
    /// A commit waits for a standby: a failover to it loses nothing.
    Synchronous,
    /// A commit waits for a standby, and none of those named is connected: nothing is accepted.
    Waiting,
    /// A commit waits for a standby, and this user may not see which ones are connected.
    Hidden,
}

fn guarantee(health: &DatabaseHealth) -> Guarantee {
    // With `local` and `off` a commit waits for no standby.
    let waits = !matches!(health.synchronous_commit.as_str(), "local" | "off");
    if health.synchronous_standby_names.is_empty() || !waits {
        return if health.standbys == 0 { Guarantee::Single } else { Guarantee::Asynchronous };
    }
    match health.synchronous_standbys {
        Some(0) => Guarantee::Waiting,
        Some(_) => Guarantee::Synchronous,
        None => Guarantee::Hidden,
    }
}

pub(super) fn finding(health: &DatabaseHealth) -> Finding {
    let guarantee = guarantee(health);
    let (verdict, guarantee, fix) = match guarantee {
        Guarantee::Single => (Verdict::Ok, "single: a lost disk loses everything since the last backup", None),
        Guarantee::Synchronous => (Verdict::Ok, "synchronous: a failover to such a standby loses nothing", None),
        Guarantee::Asynchronous => (
            Verdict::Warn,
            "asynchronous: a failover loses the last accepted messages",
            Some("set synchronous_standby_names, unless that loss is acceptable (docs/operations/failover.md)"),
        ),
        Guarantee::Waiting => (
            Verdict::Fail,
            "synchronous, but no standby of synchronous_standby_names is connected: commits wait",
            Some("start such a standby, or empty synchronous_standby_names until there is one"),
        ),
        Guarantee::Hidden => (
            Verdict::Warn,
            "synchronous, if a standby of synchronous_standby_names is connected",
            Some("grant pg_monitor to the user, so that this can be checked"),
        ),
    };
    let found = format!("{guarantee}; {} standbys connected", health.standbys);
    Finding { check: "postgres replication", verdict, found, fix }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::healthy;

    #[test]
    fn the_guarantee_follows_from_settings_and_connected_standbys() {
        let of = |names: &str, commit: &str, standbys, synchronous_standbys| {
            guarantee(&DatabaseHealth {
                synchronous_standbys,
                synchronous_standby_names: names.into(),
                synchronous_commit: commit.into(),
                standbys,
                ..healthy()
            })
        };
        assert_eq!(of("", "on", 0, Some(0)), Guarantee::Single);
        assert_eq!(of("", "on", 2, Some(0)), Guarantee::Asynchronous);
        assert_eq!(of("ANY 1 (a, b)", "on", 2, Some(2)), Guarantee::Synchronous);
        assert_eq!(of("*", "remote_write", 1, Some(1)), Guarantee::Synchronous);
        assert_eq!(of("*", "local", 1, Some(0)), Guarantee::Asynchronous);
        assert_eq!(of("*", "on", 0, Some(0)), Guarantee::Waiting);
        // Only another standby is connected.
        assert_eq!(of("ANY 1 (a, b)", "on", 1, Some(0)), Guarantee::Waiting);
        assert_eq!(of("a", "on", 1, None), Guarantee::Hidden);
    }
}
