//! As much of the library's `sys` as the inbox names.

pub(crate) mod process {
    pub(crate) fn is_forked() -> bool {
        false
    }
}
