//! The offsets of fields in Python's structures. Python 3.13 and later publish them for debuggers. For 3.11 and 3.12 there are tables here.

/// The bits of an object reference that are not part of its address (3.14).
pub(super) const TAGS: usize = 7;

/// The offsets of fields, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The address of a record with the innermost frame, in the thread's state. `None` if that frame is in the state itself.
    pub(super) thread_record: Option<usize>,
    /// The address of the innermost frame, in the record or the state.
    pub(super) current_frame: usize,
    /// The address of the calling frame, in a frame.
    pub(super) previous: usize,
    /// The object that is executed, usually code, in a frame.
    pub(super) code: usize,
    /// The address of the current instruction, in a frame.
    pub(super) instruction: usize,
    /// In a frame of 3.12: the byte that names the owner, and its value if native code called Python. Such a frame has code but is not a
    /// function of the program. In later versions it has no code.
    pub(super) entry_owner: Option<(usize, u8)>,
    /// In a frame of a free-threaded 3.14 or later: the index of its thread's copy of the instructions, an `int`. Only 0, the main thread's,
    /// is in the code object.
    pub(super) copy: Option<usize>,
    /// The names of the file and the function, and the table of lines, in a code object.
    pub(super) code_parts: [usize; 3],
    /// The first instruction, in a code object.
    pub(super) first_instruction: usize,
    /// The identity of a code object, which an earlier one at the same address does not share.
    pub(super) identity: Identity,
    /// The first line of a code object, an `int`.
    pub(super) first_line: usize,
    /// The type, in an object.
    pub(super) object_type: usize,
    /// The length and the first byte, in a bytes object.
    pub(super) bytes: [usize; 2],
    /// The id of the thread that `pthread_self` returns, in its state.
    pub(super) thread_id: usize,
    pub(super) threads_lock: ThreadsLock,
}

/// The lock of the list of interpreters and of their lists of threads, in `_PyRuntime`. The next word is the address of the first
/// interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadsLock {
    /// A pointer to a lock, a `PyThread_type_lock` (3.11 and 3.12).
    Object { at: usize },
    /// A lock of one byte, a `PyMutex` (3.13 and later).
    Byte { at: usize },
}

/// The identity of a code object, which differs from an earlier one's at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    /// The word that contains the version, a number that no other code object has (3.12 and later).
    Version { at: usize },
    /// The address of the name, the hash in the name, and the word with the first line, because 3.11 has no version.
    Name { at: usize, hash: usize, first_line: usize },
}

/// The offsets come from `Include/internal/pycore_frame.h`, `Include/internal/pycore_runtime.h`,
/// `Include/cpython/pystate.h` and `Include/cpython/code.h` of 3.11, for 64 bits.
const PYTHON_3_11: Layout = Layout {
    thread_record: Some(56),
    current_frame: 8,
    previous: 48,
    code: 32,
    instruction: 56,
    entry_owner: None,
    copy: None,
    code_parts: [112, 128, 136],
    first_instruction: 184,
    identity: Identity::Name { at: 120, hash: 24, first_line: 72 },
    first_line: 72,
    object_type: 8,
    bytes: [16, 32],
    thread_id: 152,
    threads_lock: ThreadsLock::Object { at: 32 },
};

/// The offsets of 3.12 come from the same files.
const PYTHON_3_12: Layout = Layout {
    current_frame: 0,
    previous: 8,
    code: 0,
    entry_owner: Some((70, 3)),
    first_instruction: 192,
    identity: Identity::Version { at: 88 },
    first_line: 68,
    thread_id: 136,
    ..PYTHON_3_11
};

/// `_Py_Debug_Cookie`
const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");

/// The start of a group of `_Py_DebugOffsets`, in words.
const RUNTIME_STATE: usize = 3;

impl Layout {
    /// Returns the layout of a version, such as 0x030d. `word` reads a word of `_PyRuntime`, by its index. Returns `None` if the version is
    /// not known, or if its record is not as expected.
    pub(super) fn of(version: u32, word: impl Fn(usize) -> u64) -> Option<Self> {
        // The starts of the other groups, and the index of `thread_id` in the first one.
        let ([thread_state, interpreter_frame, code_object, pyobject, bytes_object], thread_id) = match version {
            0x030b => return Some(PYTHON_3_11),
            0x030c => return Some(PYTHON_3_12),
            0x030d => ([19, 28, 34, 44, 64], 5),
            0x030e => ([22, 31, 39, 50, 74], 5),
            0x030f => ([22, 39, 47, 58, 86], 8),
            _ => return None,
        };
        if word(0) != COOKIE || word(1) >> 16 != u64::from(version) {
            return None;
        }
        // An object consists of a count and a type. In a free-threaded Python, it also has a lock, an owner and the owner's count. The type is
        // its last word.
        let is_free_threaded = word(2) != 0;
        let object = if is_free_threaded { 32 } else { 16 };
        if [word(pyobject), word(pyobject + 1)] != [object, object - 8] {
            return None;
        }
        // The first word of a group is the size of the structure; all fields are inside.
        let field = |group: usize, index: usize| {
            let offset = word(group + index);
            (offset < word(group) && word(group) < 1 << 20).then(|| usize::try_from(offset).ok()).flatten()
        };
        let interpreters = field(RUNTIME_STATE, 2)?;
        // The version is the last of six numbers between these two fields.
        let (first_line, names_of_locals) = (field(code_object, 5)?, field(code_object, 7)?);
        if names_of_locals.checked_sub(28) != Some(first_line) {
            return None;
        }
        Some(Self {
            thread_record: None,
            current_frame: field(thread_state, 4)?,
            previous: field(interpreter_frame, 1)?,
            code: field(interpreter_frame, 2)?,
            instruction: field(interpreter_frame, 3)?,
            entry_owner: None,
            copy: if is_free_threaded && version > 0x030d { Some(field(interpreter_frame, 7)?) } else { None },
            code_parts: [field(code_object, 1)?, field(code_object, 3)?, field(code_object, 4)?],
            first_instruction: field(code_object, 9)?,
            identity: Identity::Version { at: names_of_locals - 8 },
            first_line,
            object_type: field(pyobject, 1)?,
            bytes: [field(bytes_object, 1)?, field(bytes_object, 2)?],
            thread_id: field(thread_state, thread_id)?,
            threads_lock: ThreadsLock::Byte { at: interpreters.checked_sub(size_of::<usize>())? },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    /// Creates a record of these groups, except for fields that are not read. The first group starts at [`RUNTIME_STATE`], and the others
    /// at `starts`.
    fn record(version: u64, starts: [usize; 5], [runtime, others @ ..]: [&[u64]; 6]) -> Vec<u64> {
        let mut words = vec![0; 96];
        (words[0], words[1]) = (COOKIE, version);
        for (at, fields) in iter::once((RUNTIME_STATE, runtime)).chain(starts.into_iter().zip(others)) {
            words[at..at + fields.len()].copy_from_slice(fields);
        }
        words
    }

    /// The groups of 3.13.0.
    const GROUPS: [&[u64]; 6] = [
        &[400_000, 608, 632],
        &[600, 0, 8, 16, 72, 152],
        &[88, 8, 0, 56, 72, 70],
        &[208, 112, 120, 128, 136, 68, 52, 96, 104, 200],
        &[16, 8],
        &[40, 16, 32],
    ];

    fn record_3_13() -> Vec<u64> {
        record(0x030d_00f0, [19, 28, 34, 44, 64], GROUPS)
    }

    /// Where the groups of 3.14 start.
    const STARTS_3_14: [usize; 5] = [22, 31, 39, 50, 74];

    /// Creates a record like that of the free-threaded 3.14.7.
    fn free_threaded() -> Vec<u64> {
        let groups: [&[u64]; 6] = [
            &[362_368, 784, 808],
            &[832, 0, 8, 16, 72, 152],
            &[88, 8, 0, 56, 80, 78, 64, 72],
            &[240, 128, 136, 144, 152, 84, 68, 112, 120, 232],
            &[32, 24],
            &[56, 32, 48],
        ];
        let mut words = record(0x030e_07f0, STARTS_3_14, groups);
        words[2] = 1;
        words
    }

    /// Creates a record like 3.15.0's.
    fn record_3_15() -> Vec<u64> {
        let groups: [&[u64]; 6] = [
            &[346_488, 912, 936],
            &[888, 0, 8, 16, 72, 80, 88, 96, 176],
            &[88, 8, 0, 56, 80, 74, 64, 0],
            &[216, 112, 120, 128, 136, 68, 52, 96, 104, 208, 0],
            &[16, 8],
            &[40, 16, 32],
        ];
        record(0x030f_00f0, [22, 39, 47, 58, 86], groups)
    }

    const PYTHON_3_13: Layout = Layout {
        thread_record: None,
        current_frame: 72,
        entry_owner: None,
        first_instruction: 200,
        thread_id: 152,
        threads_lock: ThreadsLock::Byte { at: 624 },
        ..PYTHON_3_12
    };

    fn of(version: u32, words: &[u64]) -> Option<Layout> {
        Layout::of(version, |index| words[index])
    }

    #[test]
    fn later_versions_publish_their_layout() {
        assert_eq!(of(0x030d, &record_3_13()), Some(PYTHON_3_13));
        assert_eq!(of(0x030e, &record(0x030e_00f0, STARTS_3_14, GROUPS)), Some(PYTHON_3_13));
        let of_3_14 = Layout {
            copy: Some(72),
            code_parts: [128, 144, 152],
            first_instruction: 232,
            identity: Identity::Version { at: 104 },
            first_line: 84,
            object_type: 24,
            bytes: [32, 48],
            threads_lock: ThreadsLock::Byte { at: 800 },
            ..PYTHON_3_13
        };
        assert_eq!(of(0x030e, &free_threaded()), Some(of_3_14));
        let threads_lock = ThreadsLock::Byte { at: 928 };
        let of_3_15 = Layout { first_instruction: 208, thread_id: 176, threads_lock, ..PYTHON_3_13 };
        assert_eq!(of(0x030f, &record_3_15()), Some(of_3_15));
    }

    #[test]
    fn nothing_is_guessed() {
        let good = record_3_13();
        for (index, value) in [
            (0, 0),
            (1, 0x030e_00f0),
            (2, 1),
            (3, 0),
            (5, 0),
            (19, 0),
            (28, 8),
            (34, 1 << 20),
            (39, 64),
            (44, 32),
            (45, 24),
            (45, 0),
        ] {
            let mut words = good.clone();
            words[index] = value;
            assert_eq!(of(0x030d, &words), None, "word {index} is {value:#x}");
        }
        for version in [0x030a, 0x0310, 0x0400, 0] {
            assert_eq!(of(version, &record_3_13()), None);
        }
    }

    #[test]
    fn earlier_versions_have_a_table() {
        let unread = |_| -> u64 { panic!("there is no record") };
        assert_eq!(Layout::of(0x030b, unread), Some(PYTHON_3_11));
        assert_eq!(Layout::of(0x030c, unread), Some(PYTHON_3_12));
    }
}
