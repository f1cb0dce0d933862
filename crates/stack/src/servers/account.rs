//! The user that Postgres runs as, and the folders accessible to it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::os;

/// Returns the user and group that Postgres must run as, because its programs refuse to start as root. `None` when this
/// process is not root.
pub(crate) fn postgres_account() -> Option<(u32, u32)> {
    if os::effective_uid() != 0 {
        return None;
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    Some(find_user(&passwd, "postgres").or_else(|| find_user(&passwd, "nobody")).unwrap_or((65_534, 65_534)))
}

fn find_user(passwd: &str, name: &str) -> Option<(u32, u32)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let mut numbers = fields.skip(1).map(|field| field.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    })
}

/// Returns whether `account` may traverse `dir` and all its parents. For missing folders the nearest existing ancestor
/// decides.
pub(crate) fn can_traverse(account: Option<(u32, u32)>, dir: &Path) -> bool {
    let Some((uid, gid)) = account else {
        return true;
    };
    dir.ancestors().filter_map(|ancestor| fs::metadata(ancestor).ok()).all(|meta| {
        let mode = meta.permissions().mode();
        let needed = if meta.uid() == uid {
            0o100
        } else if meta.gid() == gid {
            0o010
        } else {
            0o001
        };
        mode & needed != 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read_from_passwd() {
        let passwd = "root:x:0:0::/root:/bin/sh\npostgres:x:101:104:admin:/var/lib:/bin/bash\n";
        assert_eq!(find_user(passwd, "postgres"), Some((101, 104)));
        assert_eq!(find_user(passwd, "nobody"), None);
    }

    #[test]
    fn a_closed_home_is_not_traversable_for_a_stranger() {
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let stranger = Some((u32::MAX - 2, u32::MAX - 2));
        assert!(!can_traverse(stranger, &home.path().join("not/there/yet")));
        assert!(can_traverse(None, home.path()));
    }
}
