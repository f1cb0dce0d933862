//! Findings about settings on which the installation's security depends.

use relay_engine::settings::SecuritySettings;

use super::{Finding, Installation, Verdict};

pub(super) fn security_findings(installation: &Installation) -> Vec<Finding> {
    let hosted = installation.hosted;
    let settings = SecuritySettings {
        database_url: Some(&installation.database_url),
        // `database_url` is the direct one already, if the operator named one.
        database_direct_url: None,
        nats_url: Some(&installation.nats.url),
        // Only hosted installations need keys, so others count as complete.
        has_secret_keys: !hosted || !installation.secret_keys.is_empty(),
        has_signing_secret: Some(!hosted || installation.has_signing_secret),
    };
    let problems = settings.problems();
    if problems.is_empty() {
        let found = "connections to other hosts are verified".to_owned();
        return vec![Finding { check: "security", verdict: Verdict::Ok, found, fix: None }];
    }
    let finding = |problem: &'static str| {
        let (found, fix) = problem.split_once(": ").unwrap_or((problem, "see docs/operations/install.md"));
        Finding { check: "security", verdict: Verdict::Warn, found: found.to_owned(), fix: Some(fix) }
    };
    problems.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use relay_engine::access::secrets::KeyList;
    use relay_stream::NatsServers;

    use super::{super::tests::worst, *};

    #[test]
    fn insecure_settings_of_a_hosted_installation_are_findings() {
        let examine = |host: &str, hosted| {
            security_findings(&Installation {
                database_url: format!("postgres://u@{host}/relay"),
                nats: NatsServers { url: format!("nats://{host}:4222"), ca_file: None },
                secret_keys: KeyList::default(),
                has_signing_secret: false,
                hosted,
            })
        };
        assert_eq!(worst(&examine("127.0.0.1", false)), (Verdict::Ok, vec![]));
        assert_eq!(worst(&examine("servers", false)), (Verdict::Warn, vec!["security"; 2]));
        let hosted = examine("servers", true);
        assert_eq!(worst(&hosted), (Verdict::Warn, vec!["security"; 4]));
        assert!(hosted.iter().all(|finding| finding.fix.is_some()), "{hosted:?}");
    }
}
