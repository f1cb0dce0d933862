//! `relayctl workspace quotas`: shows and changes quotas.

use anyhow::{Context as _, Result};
use relay_domain::workspaces::plan::{LimitOverrides, Plan};
use serde_json::{Map, Value, json};

use crate::{connection::Database, output::Output};

#[derive(Debug, clap::Args)]
pub(crate) struct Quotas {
    #[command(flatten)]
    database: Database,
    /// Id or name.
    workspace: String,
    /// New plan.
    #[arg(long, value_parser = parse_plan)]
    plan: Option<Plan>,
    /// Limit that overrides the plan: `--set agents=200`. Repeatable.
    #[arg(long, value_name = "NAME=NUMBER", value_parser = parse_limit)]
    set: Vec<(String, u64)>,
    /// Limit to reset to the plan: `--unset agents`. Repeatable.
    #[arg(long, value_name = "NAME", value_parser = parse_limit_name)]
    unset: Vec<String>,
}

pub(crate) fn parse_plan(text: &str) -> Result<Plan, String> {
    Plan::parse(text).ok_or_else(|| "must be free, pro or enterprise".to_owned())
}

/// Validates a limit name of the API. The error lists the known names.
fn parse_limit_name(text: &str) -> Result<String, String> {
    serde_json::from_value::<LimitOverrides>(json!({ text: null })).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

fn parse_limit(text: &str) -> Result<(String, u64), String> {
    let (named, number) = text.split_once('=').ok_or("must be like agents=200")?;
    Ok((parse_limit_name(named)?, number.parse().map_err(|_| format!("{number:?} is not a whole number"))?))
}

/// Shows the quotas of a workspace, after applying changes.
pub(crate) async fn run(arguments: Quotas, out: Output) -> Result<()> {
    let admin = arguments.database.connect()?;
    let scope = admin
        .find_workspace(&arguments.workspace)
        .await
        .with_context(|| format!("find workspace {}", arguments.workspace))?;
    let (_, own) = admin.quotas(scope).await.context("read the quotas")?;
    if arguments.plan.is_some() || !arguments.set.is_empty() || !arguments.unset.is_empty() {
        let mut changed = limit_fields(&own)?;
        // Removed before they are set: a name in both gets the new limit.
        changed.extend(arguments.unset.into_iter().map(|name| (name, Value::Null)));
        changed.extend(arguments.set.into_iter().map(|(name, number)| (name, number.into())));
        let own = serde_json::from_value(Value::Object(changed)).context("a number is too large")?;
        admin.set_quotas(scope, arguments.plan, &own).await.context("change the quotas")?;
    }
    let (plan, own) = admin.quotas(scope).await.context("read the quotas")?;
    let mut own = limit_fields(&own)?;
    own.retain(|_, limit| !limit.is_null());
    let report = json!({ "workspace_id": scope.workspace_id(), "plan": plan.as_str(), "own": own });
    out.print_value(&report, |_| {
        let limits = own.iter().map(|(name, limit)| format!("\n{name} {limit}"));
        let rest =
            if own.is_empty() { "\nnothing differs from the plan" } else { "\neverything else as the plan says" };
        format!("plan {}{}{rest}", plan.as_str(), limits.collect::<String>())
    })
}

fn limit_fields(own: &LimitOverrides) -> Result<Map<String, Value>> {
    let limits = serde_json::to_value(own)?;
    let Value::Object(fields) = limits else { anyhow::bail!("limits are no object but {limits}") };
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_has_a_known_name_and_a_whole_number() {
        assert_eq!(parse_limit("agents=200"), Ok(("agents".to_owned(), 200)));
        for wrong in ["agents", "agents=", "agents=-1", "agents=many", "agent=5", "=5", "plan=5"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
        assert!(
            parse_limit_name("agent").is_err_and(|error| error.contains("mailbox_depth")),
            "the error lists the known names"
        );
    }
}
