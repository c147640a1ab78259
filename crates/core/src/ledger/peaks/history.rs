//! The bytes of one group at earlier moments.

/// The number of a moment; 0 is before all moments.
pub(super) type Moment = u64;

/// The bytes of one group at earlier moments.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct GroupHistory {
    /// The last moment for which the group was saved. The group did not change between this moment and the next one.
    pub(super) moment: Moment,
    /// The bytes of the group at that moment.
    pub(super) bytes: i64,
    /// The bytes of the group at earlier moments, the oldest first. Most groups have none, so this field takes only one word.
    #[expect(clippy::box_collection, reason = "one word in each group")]
    pub(super) earlier: Option<Box<Vec<(Moment, i64)>>>,
}

/// The bytes of a group and their history.
#[derive(Debug, Default)]
pub(in super::super) struct GroupBytes {
    pub(in super::super) bytes: i64,
    pub(in super::super) history: GroupHistory,
}

impl GroupHistory {
    /// Returns the bytes that the group, which has `bytes` now, had at a needed moment.
    pub(super) fn at(&self, moment: Moment, bytes: i64) -> i64 {
        if self.moment < moment {
            return bytes;
        }
        let earlier = self.earlier.iter().flat_map(|earlier| earlier.iter()).find(|(saved, _)| *saved >= moment);
        earlier.map_or(self.bytes, |(_, bytes)| *bytes)
    }
}
