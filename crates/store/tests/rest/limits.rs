//! Quotas, and what gateways take of a request budget.

use relay_domain::workspaces::plan::{LimitOverrides, Plan};
use relay_store::{EffectiveLimits, QuotasRow, RateLimitGrant};

use crate::fixture::Database;

#[tokio::test]
async fn units_are_granted_once_and_again_each_minute() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    let take = |minute, budget, wanted| db.store.acquire_rate_limit_units(scope, "requests", minute, budget, wanted);
    assert_eq!(take(7, 100, 60).await.unwrap(), RateLimitGrant { granted: 60, acquired_by_all: 60 });
    assert_eq!(take(7, 100, 60).await.unwrap(), RateLimitGrant { granted: 40, acquired_by_all: 100 });
    assert_eq!(take(7, 100, 60).await.unwrap(), RateLimitGrant { granted: 0, acquired_by_all: 100 });
    assert_eq!(
        take(7, 110, 60).await.unwrap(),
        RateLimitGrant { granted: 10, acquired_by_all: 110 },
        "a larger budget counts at once"
    );
    assert_eq!(
        take(7, 50, 60).await.unwrap(),
        RateLimitGrant { granted: 0, acquired_by_all: 110 },
        "so does a smaller one"
    );
    assert_eq!(take(8, 100, 300).await.unwrap(), RateLimitGrant { granted: 100, acquired_by_all: 100 });
    assert_eq!(take(7, 100, 60).await.unwrap().granted, 0, "that minute is over");
    let other = db.store.acquire_rate_limit_units(scope, "requests:agent:5", 8, 50, 20).await.unwrap();
    assert_eq!(other, RateLimitGrant { granted: 20, acquired_by_all: 20 }, "an account of its own");
    assert_eq!(db.store.prune_rate_limits(8, 10).await.unwrap(), 0);
    assert_eq!(db.store.prune_rate_limits(9, 1).await.unwrap(), 1, "bounded");
    assert_eq!(db.store.prune_rate_limits(9, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn concurrent_acquisitions_share_the_limit() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    let acquisitions: tokio::task::JoinSet<_> = (0..40)
        .map(|_| {
            let store = db.store.clone();
            async move { store.acquire_rate_limit_units(scope, "requests", 1, 1000, 30).await.unwrap().granted }
        })
        .collect();
    assert_eq!(acquisitions.join_all().await.into_iter().sum::<u32>(), 1000);
}

#[tokio::test]
async fn quotas_are_the_plans_until_set() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    db.run("INSERT INTO workspaces (workspace_id, name, created_at) VALUES (7, 'w', now()) ON CONFLICT DO NOTHING")
        .await;
    let effective = EffectiveLimits { mailbox_depth: 1000, message_days: None };
    let of_the_plan = |plan| QuotasRow { plan, overrides: LimitOverrides::default(), effective };
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(of_the_plan(Plan::Enterprise)));
    let overrides = LimitOverrides {
        requests_per_minute: Some(90),
        file_bytes: Some(0),
        mailbox_depth: Some(50),
        message_days: Some(30),
        ..LimitOverrides::default()
    };
    assert!(db.store.set_quotas(scope, Some(Plan::Free), &overrides).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(QuotasRow { plan: Plan::Free, overrides, effective }));
    let effective = EffectiveLimits { mailbox_depth: 50, message_days: Some(30) };
    db.store.set_effective_limits(scope, effective).await.unwrap();
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(QuotasRow { plan: Plan::Free, overrides, effective }));
    let of_the_plan = |plan| QuotasRow { plan, overrides: LimitOverrides::default(), effective };
    assert!(db.store.set_quotas(scope, None, &LimitOverrides::default()).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(of_the_plan(Plan::Free)), "replaced, and the plan stays");
    db.run("UPDATE workspaces SET deleted_at = now()").await;
    assert!(!db.store.set_quotas(scope, None, &overrides).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), None);
}
