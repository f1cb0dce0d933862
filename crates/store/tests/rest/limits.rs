//! Quotas, and what gateways take of a request budget.

use relay_domain::plan::{OwnLimits, Plan};
use relay_store::{LimitsInForce, QuotasRow, Taken};

use crate::fixture::Database;

#[tokio::test]
async fn a_budget_is_given_once_and_anew_each_minute() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    let take = |minute, budget, wanted| db.store.take_of_budget(scope, "requests", minute, budget, wanted);
    assert_eq!(take(7, 100, 60).await.unwrap(), Taken { got: 60, by_all: 60 });
    assert_eq!(take(7, 100, 60).await.unwrap(), Taken { got: 40, by_all: 100 });
    assert_eq!(take(7, 100, 60).await.unwrap(), Taken { got: 0, by_all: 100 });
    assert_eq!(take(7, 110, 60).await.unwrap(), Taken { got: 10, by_all: 110 }, "a larger budget counts at once");
    assert_eq!(take(7, 50, 60).await.unwrap(), Taken { got: 0, by_all: 110 }, "so does a smaller one");
    assert_eq!(take(8, 100, 300).await.unwrap(), Taken { got: 100, by_all: 100 });
    assert_eq!(take(7, 100, 60).await.unwrap().got, 0, "that minute is over");
    let other = db.store.take_of_budget(scope, "requests:agent:5", 8, 50, 20).await.unwrap();
    assert_eq!(other, Taken { got: 20, by_all: 20 }, "an account of its own");
    assert_eq!(db.store.prune_rate_budgets(8, 10).await.unwrap(), 0);
    assert_eq!(db.store.prune_rate_budgets(9, 1).await.unwrap(), 1, "bounded");
    assert_eq!(db.store.prune_rate_budgets(9, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn many_takers_get_the_budget_together() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    let takers: tokio::task::JoinSet<_> = (0..40)
        .map(|_| {
            let store = db.store.clone();
            async move { store.take_of_budget(scope, "requests", 1, 1000, 30).await.unwrap().got }
        })
        .collect();
    assert_eq!(takers.join_all().await.into_iter().sum::<u32>(), 1000);
}

#[tokio::test]
async fn quotas_are_the_plans_until_set() {
    let db = Database::fresh().await;
    let (scope, _) = Database::mailbox(1);
    db.run("INSERT INTO workspaces (workspace_id, name, created_at) VALUES (7, 'w', now()) ON CONFLICT DO NOTHING")
        .await;
    let in_force = LimitsInForce { mailbox_depth: 1000, message_days: None };
    let of_the_plan = |plan| QuotasRow { plan, own: OwnLimits::default(), in_force };
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(of_the_plan(Plan::Enterprise)));
    let own = OwnLimits {
        requests_per_minute: Some(90),
        file_bytes: Some(0),
        mailbox_depth: Some(50),
        message_days: Some(30),
        ..OwnLimits::default()
    };
    assert!(db.store.set_quotas(scope, Some(Plan::Free), &own).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(QuotasRow { plan: Plan::Free, own, in_force }));
    let in_force = LimitsInForce { mailbox_depth: 50, message_days: Some(30) };
    db.store.put_in_force(scope, in_force).await.unwrap();
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(QuotasRow { plan: Plan::Free, own, in_force }));
    let of_the_plan = |plan| QuotasRow { plan, own: OwnLimits::default(), in_force };
    assert!(db.store.set_quotas(scope, None, &OwnLimits::default()).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), Some(of_the_plan(Plan::Free)), "replaced, and the plan stays");
    db.run("UPDATE workspaces SET deleted_at = now()").await;
    assert!(!db.store.set_quotas(scope, None, &own).await.unwrap());
    assert_eq!(db.store.quotas(scope).await.unwrap(), None);
}
