//! [`Environment`]: the variables and files that settings are read from.

/// Source of settings besides flags.
pub trait Environment {
    /// Returns the value of a variable; an empty one counts as unset.
    fn variable(&self, name: &str) -> Option<String>;
    /// Returns the content of a file, or why it cannot be read.
    fn file(&self, path: &str) -> Result<String, String>;
}

/// Environment and files of this process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        // A value that is not UTF-8 is reported as invalid, not treated as unset.
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        Some(value).filter(|value| !value.is_empty())
    }

    fn file(&self, path: &str) -> Result<String, String> {
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    }
}
