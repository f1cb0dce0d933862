//! Limit of open files, which bounds the connections of a process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files to the most that this process may have, and returns it; `None` for unlimited.
#[must_use]
pub fn raise_file_limit() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        // The previous limit stays, and bounds the connections.
        Err(_) => current,
    }
}
