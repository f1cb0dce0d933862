//! `relayctl workspace quotas`.

use anyhow::{Context as _, Result};
use relay_domain::plan::{OwnLimits, Plan};
use serde_json::{Map, Value, json};

use crate::{connection::Database, output::Output};

#[derive(Debug, clap::Args)]
pub(crate) struct Quotas {
    #[command(flatten)]
    database: Database,
    /// Id or name.
    workspace: String,
    /// The plan it is on from now on.
    #[arg(long, value_parser = plan)]
    plan: Option<Plan>,
    /// A limit of its own, whatever its plan says: `--set agents=200`. As often as needed.
    #[arg(long, value_name = "NAME=NUMBER", value_parser = limit)]
    set: Vec<(String, u64)>,
    /// A limit that is as its plan says again: `--unset agents`. As often as needed.
    #[arg(long, value_name = "NAME", value_parser = name)]
    unset: Vec<String>,
}

fn plan(given: &str) -> Result<Plan, String> {
    Plan::parse(given).ok_or_else(|| "must be free, pro or enterprise".to_owned())
}

/// Names as the API has them: one that it does not know is refused with those that it knows.
fn name(given: &str) -> Result<String, String> {
    serde_json::from_value::<OwnLimits>(json!({ given: null })).map_err(|error| error.to_string())?;
    Ok(given.to_owned())
}

fn limit(given: &str) -> Result<(String, u64), String> {
    let (named, number) = given.split_once('=').ok_or("must be like agents=200")?;
    Ok((name(named)?, number.parse().map_err(|_| format!("{number:?} is not a whole number"))?))
}

/// Shows what a workspace may use, after the changes if there are any.
pub(crate) async fn run(asked: Quotas, out: Output) -> Result<()> {
    let admin = asked.database.admin()?;
    let scope = admin.find(&asked.workspace).await.with_context(|| format!("find workspace {}", asked.workspace))?;
    let (_, own) = admin.quotas(scope).await.context("read the quotas")?;
    if asked.plan.is_some() || !asked.set.is_empty() || !asked.unset.is_empty() {
        let mut changed = fields(&own)?;
        changed.extend(asked.unset.into_iter().map(|name| (name, Value::Null)));
        changed.extend(asked.set.into_iter().map(|(name, number)| (name, number.into())));
        let own = serde_json::from_value(Value::Object(changed)).context("a number is too large")?;
        admin.set_quotas(scope, asked.plan, &own).await.context("change the quotas")?;
    }
    let (plan, own) = admin.quotas(scope).await.context("read the quotas")?;
    let mut own = fields(&own)?;
    own.retain(|_, limit| !limit.is_null());
    let shown = json!({ "workspace_id": scope.workspace_id(), "plan": plan.as_str(), "own": own });
    out.one(&shown, |_| {
        let limits = own.iter().map(|(name, limit)| format!("\n{name} {limit}"));
        let rest =
            if own.is_empty() { "\nnothing differs from the plan" } else { "\neverything else as the plan says" };
        format!("plan {}{}{rest}", plan.as_str(), limits.collect::<String>())
    })
}

fn fields(own: &OwnLimits) -> Result<Map<String, Value>> {
    match serde_json::to_value(own)? {
        Value::Object(fields) => Ok(fields),
        other => anyhow::bail!("limits are no object but {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_has_a_known_name_and_a_whole_number() {
        assert_eq!(limit("agents=200"), Ok(("agents".to_owned(), 200)));
        for wrong in ["agents", "agents=", "agents=-1", "agents=many", "agent=5", "=5", "plan=5"] {
            assert!(limit(wrong).is_err(), "{wrong}");
        }
        assert!(name("agent").is_err_and(|error| error.contains("mailbox_depth")), "it names those that there are");
    }
}
