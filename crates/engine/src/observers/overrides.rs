//! Overrides: changes of tokens since they were signed. Every gateway holds them in memory, so that a token is checked
//! without a read.

use std::{collections::HashMap, sync::Arc};

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, observers::ObserverView};
use relay_store::{OverrideRow, OverrideState};

use super::signed::VerifiedToken;

/// Reasons for the end of an observer's access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessEndReason {
    /// The token was revoked, or the key that signed it was retired.
    Revoked,
    /// The token was rotated.
    Rotated,
    Expired,
    /// The workspace was deleted or has expired.
    WorkspaceEnded,
    /// This gateway cannot verify the token any more: it has not reached Postgres for half a minute, or does not
    /// understand the token's limits. Another gateway may.
    Unverifiable,
}

impl AccessEndReason {
    /// Text for the client whose socket is closed.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Revoked => "observer token revoked",
            Self::Rotated => "observer token rotated",
            Self::Expired => "observer token expired",
            Self::WorkspaceEnded => "workspace deleted",
            Self::Unverifiable => "observer token cannot be verified now",
        }
    }
}

/// Present state of one token. The former view of an ended token is dropped: there may be many of them.
#[derive(Debug, PartialEq, Eq)]
enum Override {
    Ended(AccessEndReason),
    Live(Box<LiveOverride>),
}

#[derive(Debug, PartialEq, Eq)]
struct LiveOverride {
    version: i64,
    view: Arc<ObserverView>,
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Default)]
pub(super) struct Overrides(HashMap<ObserverTokenId, Override>);

/// View of a token with all overrides applied.
#[derive(Debug, Clone)]
pub(super) struct CurrentView {
    pub(super) view: Arc<ObserverView>,
    pub(super) expires_at: Option<DateTime<Utc>>,
}

impl Overrides {
    /// Applies the rows that were read. Returns true if any of them is new.
    pub(super) fn apply(&mut self, rows: Vec<OverrideRow>) -> bool {
        let mut changed = false;
        for row in rows {
            let token = row.token_id;
            let new = match (row.state, parse_row_view(&row)) {
                (OverrideState::WorkspaceDeleted, _) => Override::Ended(AccessEndReason::WorkspaceEnded),
                (OverrideState::Live, Some(view)) => {
                    Override::Live(Box::new(LiveOverride { version: row.version, view, expires_at: row.expires_at }))
                }
                (OverrideState::Revoked, _) => Override::Ended(AccessEndReason::Revoked),
                // Scopes or filters of a newer version: limits that are not understood cannot be enforced.
                (OverrideState::Live, None) => Override::Ended(AccessEndReason::Unverifiable),
            };
            // Rows at the position of the last read may come again, and change nothing.
            changed |= self.0.get(&token) != Some(&new);
            self.0.insert(token, new);
        }
        changed
    }

    /// Returns the present view of a token: its own claims, unless it was changed since.
    pub(super) fn current_view(
        &self,
        known: &VerifiedToken,
        now: DateTime<Utc>,
    ) -> Result<CurrentView, AccessEndReason> {
        let present = match self.0.get(&known.token_id) {
            Some(Override::Ended(reason)) => return Err(*reason),
            Some(Override::Live(live)) if known.version < live.version => return Err(AccessEndReason::Rotated),
            Some(Override::Live(live)) if known.version == live.version => {
                CurrentView { view: Arc::clone(&live.view), expires_at: live.expires_at }
            }
            // Rotated since the last refresh: the token is newer than its override.
            Some(Override::Live(_)) | None => {
                CurrentView { view: Arc::clone(&known.view), expires_at: known.expires_at }
            }
        };
        if present.expires_at.is_some_and(|at| at <= now) { Err(AccessEndReason::Expired) } else { Ok(present) }
    }
}

/// Parses a stored view; `None` if this version does not understand all of it.
pub(super) fn parse_view(scopes: &[String], filters: &serde_json::Value) -> Option<Arc<ObserverView>> {
    let scopes = scopes.iter().map(|text| text.parse()).collect::<Result<_, _>>().ok()?;
    let filters = serde_json::from_value(filters.clone()).ok()?;
    Some(Arc::new(ObserverView { scopes, filters }))
}

fn parse_row_view(row: &OverrideRow) -> Option<Arc<ObserverView>> {
    parse_view(&row.scopes, &row.filters)
}

#[cfg(test)]
mod tests {
    use relay_domain::{
        WorkspaceId, WorkspaceScope,
        observers::{ObserverFilters, ObserverScope, ScopeSet},
    };
    use serde_json::json;

    use super::*;

    const TOKEN: ObserverTokenId = ObserverTokenId::new(7);

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("an instant")
    }

    fn known(version: i64, expires_at: Option<i64>) -> VerifiedToken {
        VerifiedToken {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            token_id: TOKEN,
            version,
            view: Arc::new(ObserverView {
                scopes: ScopeSet::from_scopes(&[ObserverScope::Stream]),
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
    fn overrides_take_precedence_over_claims() {
        use OverrideState::{Live, Revoked, WorkspaceDeleted};
        let (own, other) = (Ok(ObserverScope::Stream), Ok(ObserverScope::Files));
        for (known, row, expected) in [
            (known(1, None), None, own),
            (known(1, Some(50)), None, Err(AccessEndReason::Expired)),
            (known(1, Some(51)), None, own),
            (known(1, None), Some(row(Live, 1, None)), other),
            // An expiry may be moved in both directions.
            (known(1, Some(10)), Some(row(Live, 1, None)), other),
            (known(1, None), Some(row(Live, 1, Some(50))), Err(AccessEndReason::Expired)),
            (known(1, None), Some(row(Live, 2, None)), Err(AccessEndReason::Rotated)),
            (known(2, None), Some(row(Live, 2, None)), other),
            (known(3, None), Some(row(Live, 2, None)), own),
            (known(3, None), Some(row(Revoked, 1, None)), Err(AccessEndReason::Revoked)),
            (known(1, None), Some(row(WorkspaceDeleted, 1, None)), Err(AccessEndReason::WorkspaceEnded)),
            (
                known(1, None),
                Some(OverrideRow { scopes: vec!["new:read".into()], ..row(Live, 1, None) }),
                Err(AccessEndReason::Unverifiable),
            ),
            (
                known(1, None),
                Some(OverrideRow { filters: json!({"new": 1}), ..row(Live, 1, None) }),
                Err(AccessEndReason::Unverifiable),
            ),
        ] {
            let mut overrides = Overrides::default();
            let case = format!("{known:?} with {row:?}");
            overrides.apply(row.into_iter().collect());
            let present = overrides.current_view(&known, at(50));
            assert_eq!(present.map(|p| p.view.scopes.iter().next()), expected.map(Some), "{case}");
        }
    }

    #[test]
    fn repeated_overrides_change_nothing() {
        let mut overrides = Overrides::default();
        let rows = || vec![row(OverrideState::Live, 2, Some(9))];
        assert!(overrides.apply(rows()));
        assert!(!overrides.apply(rows()) && !overrides.apply(Vec::new()));
        assert!(overrides.apply(vec![row(OverrideState::Revoked, 2, Some(9))]));
    }
}
