//! What has become of tokens since they were signed. Held in memory by every gateway, so that a token is
//! checked without a read.

use std::{collections::HashMap, sync::Arc};

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, observer::ObserverView};
use relay_store::{OverrideRow, OverrideState};

use super::{GoneReason, signed::Known};

/// One token's present state. What a dead token was is not kept: there may be many of them.
#[derive(Debug, PartialEq, Eq)]
enum Override {
    Dead(GoneReason),
    Live(Box<Live>),
}

#[derive(Debug, PartialEq, Eq)]
struct Live {
    version: i64,
    view: Arc<ObserverView>,
    expires_at: Option<DateTime<Utc>>,
}

/// The overrides that this process knows.
#[derive(Debug, Default)]
pub(super) struct Overrides(HashMap<ObserverTokenId, Override>);

/// What a token may see now.
#[derive(Debug, Clone)]
pub(super) struct Present {
    pub(super) view: Arc<ObserverView>,
    pub(super) expires_at: Option<DateTime<Utc>>,
}

impl Overrides {
    /// Takes over what was read. Returns whether anything is new.
    pub(super) fn apply(&mut self, rows: Vec<OverrideRow>) -> bool {
        let mut changed = false;
        for row in rows {
            let token = row.token_id;
            let new = match (row.state, read_view(&row)) {
                (OverrideState::WorkspaceDeleted, _) => Override::Dead(GoneReason::WorkspaceGone),
                (OverrideState::Live, Some(view)) => {
                    Override::Live(Box::new(Live { version: row.version, view, expires_at: row.expires_at }))
                }
                (OverrideState::Revoked, _) => Override::Dead(GoneReason::Revoked),
                // Scopes or filters of a newer engine: what cannot be understood cannot be obeyed.
                (OverrideState::Live, None) => Override::Dead(GoneReason::Unverifiable),
            };
            changed |= self.0.get(&token) != Some(&new);
            self.0.insert(token, new);
        }
        changed
    }

    /// What a token is now: as it says of itself, unless it was changed since.
    pub(super) fn present(&self, known: &Known, now: DateTime<Utc>) -> Result<Present, GoneReason> {
        let present = match self.0.get(&known.token_id) {
            Some(Override::Dead(reason)) => return Err(*reason),
            Some(Override::Live(live)) if known.version < live.version => return Err(GoneReason::Rotated),
            Some(Override::Live(live)) if known.version == live.version => {
                Present { view: Arc::clone(&live.view), expires_at: live.expires_at }
            }
            // Rotated since this process last looked: the token is newer than what is known of it.
            Some(Override::Live(_)) | None => Present { view: Arc::clone(&known.view), expires_at: known.expires_at },
        };
        if present.expires_at.is_some_and(|at| at <= now) { Err(GoneReason::Expired) } else { Ok(present) }
    }
}

/// A stored view, if this version understands all of it.
pub(super) fn read_view_of(scopes: &[String], filters: &serde_json::Value) -> Option<Arc<ObserverView>> {
    let scopes = scopes.iter().map(|text| text.parse()).collect::<Result<_, _>>().ok()?;
    let filters = serde_json::from_value(filters.clone()).ok()?;
    Some(Arc::new(ObserverView { scopes, filters }))
}

fn read_view(row: &OverrideRow) -> Option<Arc<ObserverView>> {
    read_view_of(&row.scopes, &row.filters)
}

#[cfg(test)]
mod tests {
    use relay_domain::{
        WorkspaceId, WorkspaceScope,
        observer::{ObserverFilters, ObserverScope, ScopeSet},
    };
    use serde_json::json;

    use super::*;

    const TOKEN: ObserverTokenId = ObserverTokenId::new(7);

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("an instant")
    }

    fn known(version: i64, expires_at: Option<i64>) -> Known {
        Known {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            token_id: TOKEN,
            version,
            view: Arc::new(ObserverView {
                scopes: ScopeSet::of(&[ObserverScope::Stream]),
                filters: ObserverFilters::default(),
            }),
            expires_at: expires_at.map(at),
            kid: None,
        }
    }

    fn row(state: OverrideState, version: i64, expires_at: Option<i64>) -> OverrideRow {
        OverrideRow {
            token_id: TOKEN,
            state,
            version,
            scopes: vec!["files:read".into()],
            filters: json!({}),
            expires_at: expires_at.map(at),
        }
    }

    #[test]
    fn an_override_wins_over_the_claims() {
        use OverrideState::{Live, Revoked, WorkspaceDeleted};
        let (own, other) = (Ok(ObserverScope::Stream), Ok(ObserverScope::Files));
        for (known, row, expected) in [
            (known(1, None), None, own),
            (known(1, Some(50)), None, Err(GoneReason::Expired)),
            (known(1, Some(51)), None, own),
            (known(1, None), Some(row(Live, 1, None)), other),
            // Both ways: an end may be moved closer or further.
            (known(1, Some(10)), Some(row(Live, 1, None)), other),
            (known(1, None), Some(row(Live, 1, Some(50))), Err(GoneReason::Expired)),
            (known(1, None), Some(row(Live, 2, None)), Err(GoneReason::Rotated)),
            (known(2, None), Some(row(Live, 2, None)), other),
            (known(3, None), Some(row(Live, 2, None)), own),
            (known(3, None), Some(row(Revoked, 1, None)), Err(GoneReason::Revoked)),
            (known(1, None), Some(row(WorkspaceDeleted, 1, None)), Err(GoneReason::WorkspaceGone)),
            (
                known(1, None),
                Some(OverrideRow { scopes: vec!["new:read".into()], ..row(Live, 1, None) }),
                Err(GoneReason::Unverifiable),
            ),
            (
                known(1, None),
                Some(OverrideRow { filters: json!({"new": 1}), ..row(Live, 1, None) }),
                Err(GoneReason::Unverifiable),
            ),
        ] {
            let mut overrides = Overrides::default();
            let told = format!("{known:?} with {row:?}");
            overrides.apply(row.into_iter().collect());
            let present = overrides.present(&known, at(50));
            assert_eq!(present.map(|p| p.view.scopes.iter().next()), expected.map(Some), "{told}");
        }
    }

    #[test]
    fn what_was_known_already_changes_nothing() {
        let mut overrides = Overrides::default();
        let rows = || vec![row(OverrideState::Live, 2, Some(9))];
        assert!(overrides.apply(rows()));
        assert!(!overrides.apply(rows()) && !overrides.apply(Vec::new()));
        assert!(overrides.apply(vec![row(OverrideState::Revoked, 2, Some(9))]));
    }
}
