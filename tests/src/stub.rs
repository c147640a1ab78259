//! Reads the stubs that libcuda exports: the flag that they check, and the slot that they use.
//!
//! This reader is independent of gpumem's own reader, which the tests check.

/// The value that stubs compare a word with. Drivers write it to this word when the process ends.
pub(crate) const DEINITIALIZED: u32 = 0x321c_ba00;

/// The forms of a driver's stubs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// The stubs of drivers 470 to 555 jump.
    Jumps,
    /// The stubs of driver 580 have a frame and call.
    Calls,
}

/// One stub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stub {
    /// Its form.
    pub(crate) form: Form,
    /// The address of the slot.
    pub slot: u64,
}

impl Stub {
    /// The largest number of bytes that are read.
    pub const BYTES: usize = 32;

    /// Reads the stub at this address. Returns `None` if these bytes are not a stub.
    pub fn read(bytes: &[u8], address: u64) -> Option<Self> {
        let form = Form::ALL.into_iter().find(|form| form.matches(bytes))?;
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        // The distance counts from the end of the field.
        let from =
            |end: usize, distance: u32| (address + end as u64).wrapping_add_signed(distance.cast_signed().into());
        let slot_at = form.slot_at();
        Some(Self { form, slot: from(slot_at + 4, word(slot_at)?) })
    }
}

impl Form {
    const ALL: [Self; 2] = [Self::Jumps, Self::Calls];

    /// Returns the offset of the distance to the word. The number that the word is compared with follows.
    pub(crate) fn distance_at(self) -> usize {
        match self {
            Self::Jumps => 2,
            Self::Calls => 12,
        }
    }

    /// Returns the offset of the distance to the slot.
    pub(crate) fn slot_at(self) -> usize {
        match self {
            Self::Jumps => 14,
            Self::Calls => 28,
        }
    }

    /// Returns whether the bytes equal every stub of this form, except for the compared number.
    fn matches(self, bytes: &[u8]) -> bool {
        let fixed: &[(usize, &[u8])] = match self {
            Self::Jumps => &[(0, &[0x81, 0x3d]), (10, &[0x74]), (12, &[0xff, 0x25])],
            Self::Calls => &[
                (0, &[0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x48, 0x83, 0xec, 0x08, 0x81, 0x3d]),
                (20, &[0x0f, 0x84]),
                (26, &[0xff, 0x15]),
            ],
        };
        fixed.iter().all(|(at, part)| bytes.get(*at..).is_some_and(|rest| rest.starts_with(part)))
    }
}
