//! The threads that a scope adopts.

/// The start of a thread's name: at most 15 bytes, because Linux keeps no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadName([u8; Self::LONGEST]);

impl ThreadName {
    /// The largest number of bytes.
    pub const LONGEST: usize = 15;

    /// Creates a name from these bytes, up to the first zero, and truncates a longer name.
    pub fn new(name: &[u8]) -> Self {
        let mut bytes = [0; Self::LONGEST];
        let name = name.iter().take_while(|byte| **byte != 0);
        bytes.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
        Self(bytes)
    }

    /// Returns the bytes of the name.
    pub fn bytes(&self) -> &[u8] {
        let len = self.0.iter().position(|byte| *byte == 0).unwrap_or(Self::LONGEST);
        &self.0[..len]
    }
}

/// Threads whose allocations a scope adopts while they are in no scope, for
/// [`adopt`](https://docs.rs/gpumem/latest/gpumem/struct.GpuMemTraceBuilder.html#method.adopt).
///
/// ```
/// use gpumem::scope::Threads;
///
/// let of_burn = Threads::named("DSD-"); // its device thread is named DSD-0-0
/// assert_ne!(of_burn, Threads::Unscoped);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Threads {
    /// All threads that are in no scope.
    Unscoped,
    /// The threads in no scope whose names start with this. A name is read once, before the first allocation that depends on it.
    Named(ThreadName),
}

impl Threads {
    /// Returns the threads in no scope whose names start with `prefix`. Linux keeps 15 bytes of a name, so only the first 15
    /// bytes of `prefix` count. An empty prefix means [`Unscoped`](Self::Unscoped).
    pub fn named(prefix: &str) -> Self {
        if prefix.is_empty() { Self::Unscoped } else { Self::Named(ThreadName::new(prefix.as_bytes())) }
    }

    /// Returns whether a thread with this name is included. `name` is `None` if it is not known.
    pub fn include(&self, name: Option<&ThreadName>) -> bool {
        match self {
            Self::Unscoped => true,
            Self::Named(prefix) => name.is_some_and(|name| name.bytes().starts_with(prefix.bytes())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_compared_as_far_as_linux_keeps_names() {
        let name = |text: &str| ThreadName::new(text.as_bytes());
        let long = "tokio-runtime-worker-pool";
        for (prefix, of, expected) in [
            ("DSD-", "DSD-0-0", true),
            ("DSD-", "DSD", false),
            ("DSD-", "xDSD-", false),
            ("", "x", true),
            (long, "tokio-runtime-w", true),
            (long, "tokio-runtime-", false),
        ] {
            assert_eq!(Threads::named(prefix).include(Some(&name(of))), expected, "{prefix} {of}");
        }
        assert!(!Threads::named("x").include(None) && Threads::Unscoped.include(None));
        assert_eq!(ThreadName::new(b"ab\0cd").bytes(), b"ab");
    }
}
