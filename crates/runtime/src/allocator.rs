//! Settings of the services' allocator, made by `main` before the first thread starts.
#![expect(unsafe_code, reason = "mimalloc's options and the process flag have no safe wrapper")]

use libmimalloc_sys as mimalloc;

/// Index of `mi_option_purge_delay`, which the bindings do not name.
const PURGE_DELAY: mimalloc::mi_option_t = 15;
/// Milliseconds for which freed pages are kept. With mimalloc's second, a process that passes on many large messages
/// keeps several times its budget of bytes; without a delay each message costs three page faults (loadtest/RESULTS.md).
const DELAY_MS: std::ffi::c_long = 10;

/// Makes the allocator return freed memory to the system after [`DELAY_MS`], unless `MIMALLOC_PURGE_DELAY` says
/// otherwise.
pub fn return_freed_memory() {
    // SAFETY: writes one number of a static table. The caller has started no other thread yet.
    unsafe { mimalloc::mi_option_set_default(PURGE_DELAY, DELAY_MS) }
}

/// Turns huge pages off for this process. With them a buffer of a megabyte for a frame of which 16 KiB have arrived
/// takes two megabytes, outside of every budget.
pub fn disable_huge_pages() {
    // SAFETY: sets one flag of the process and reads no memory. A kernel without the flag changes nothing.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Indexes of options differ between versions of mimalloc.
    #[test]
    fn the_option_is_the_delay_of_a_second() {
        // SAFETY: reads one number; no other test writes it.
        let delay = || unsafe { mimalloc::mi_option_get(PURGE_DELAY) };
        assert_eq!(delay(), 1000);
        return_freed_memory();
        assert_eq!(delay(), DELAY_MS);
    }
}
