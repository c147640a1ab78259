//! Peaks of open scopes, closed scopes or devices that are kept, so that their groups can be read in parts.

use super::{
    account_id::AccountId,
    accounts::Account,
    groups::{AllocGroup, GroupState},
    meters::Meter,
    peaks::{KeptRange, PeakHistory},
    scope::Scope,
    sums::Sums,
};
use crate::model::{ByteDelta, Device, Gauge, ScopeId};

/// The increase of one group from the start of the scope to a peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupAtPeak {
    /// The group.
    pub group: AllocGroup,
    /// The bytes of the group at the peak. For a scope, its bytes at the start of the scope are subtracted.
    pub bytes: ByteDelta,
}

/// The sum of a peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakTotal {
    /// The device.
    pub device: Device,
    /// The sum of all groups and of `older`.
    pub bytes: ByteDelta,
    /// The bytes that frees of blocks older than the session changed. Above 0 only if such a free failed.
    pub older: ByteDelta,
    /// True if the sum counts the memory above the start of a scope. `false` for the peak of a device.
    pub is_over_start: bool,
}

impl Sums {
    /// Returns the peaks that include the peak of a scope, and their level.
    fn peaks(&mut self, account: Option<AccountId>, meter: u16) -> (&mut PeakHistory, i64) {
        match account.and_then(|id| self.accounts.get_mut(id)) {
            None => {
                let Meter { level, peaks, .. } = &mut self.meters.0[usize::from(meter)];
                (peaks, level.in_use)
            }
            Some(Account { level, groups, .. }) => (&mut groups.get_or_insert_default().peaks, level.in_use),
        }
    }

    /// Starts to record which allocations make the scope's peak, if that was requested.
    pub(super) fn watch_peak(&mut self, open: &mut Scope) {
        if open.spec.at_peak && open.spec.gauge == Gauge::Exact {
            let (peaks, in_use) = self.peaks(open.account, open.meter);
            open.watched = Some(peaks.watch(in_use));
        }
    }

    pub(super) fn unwatch_peak(&mut self, open: &mut Scope) {
        if let Some(watched) = open.watched.take() {
            self.peaks(open.account, open.meter).0.unwatch(&watched);
        }
    }

    /// Keeps the peak of a scope under the id `under`, if it is watched.
    pub(super) fn keep(&mut self, under: ScopeId, open: &Scope) -> Option<()> {
        let Scope { account, meter, .. } = *open;
        let watched = open.watched?;
        let (peaks, _) = self.peaks(account, meter);
        let range = peaks.range_of(&watched);
        peaks.keep(&range);
        if let Some(account) = account {
            self.accounts.keep(account);
        }
        self.kept_peaks.insert(under, KeptRange { meter, account, range });
        Some(())
    }

    /// Like [`Ledger::keep_peak`](super::Ledger::keep_peak), but for the highest sum of the live blocks of a device: ever, or since
    /// the last reset of the summary. `None` if there were none.
    pub fn keep_device_peak(&mut self, device: Device, under: ScopeId, since_reset: bool) -> Option<()> {
        let meter = self.meters.index(device, Gauge::Exact);
        let peaks = &mut self.meters.0[usize::from(meter)].peaks;
        let range = peaks.range_of_record(since_reset)?;
        peaks.keep(&range);
        self.kept_peaks.insert(under, KeptRange { meter, account: None, range });
        Some(())
    }

    /// Returns the sum of a kept peak.
    pub fn kept_peak(&self, under: ScopeId) -> Option<PeakTotal> {
        let KeptRange { meter, account, range } = self.kept_peaks.get(&under)?;
        let Meter { device, peaks, .. } = &self.meters.0[usize::from(*meter)];
        let of_account = account.and_then(|id| self.accounts.get(id)?.groups.as_ref());
        let peaks = of_account.map_or(peaks, |groups| &groups.peaks);
        let older = if range.is_record() { 0 } else { peaks.older.change_over(range) };
        let is_over_start = !range.is_record();
        let [bytes, older] = [range.bytes(), older].map(ByteDelta::new);
        Some(PeakTotal { device: *device, bytes, older, is_over_start })
    }

    /// Returns one part of the groups of a kept peak; `None` after the last part. Later events do not change the result. The peak
    /// of a device also contains the driver's blocks of pools, which are not in its sum.
    pub fn peak_part(&mut self, under: ScopeId, part: usize) -> Option<Vec<GroupAtPeak>> {
        /// The number of groups in one part. Threads that allocate wait until the part is read.
        const GROUPS: usize = if cfg!(test) { 4 } else { 1024 };
        let KeptRange { meter, account, range } = self.kept_peaks.get(&under)?;
        let first = part * GROUPS;
        let at_peak = |group: &AllocGroup, bytes: i64| {
            (bytes != 0).then(|| GroupAtPeak { group: *group, bytes: ByteDelta::new(bytes) })
        };
        if let Some(account) = account {
            let all = &self.accounts.get(*account)?.groups.as_ref()?.all;
            let groups = all.get(first..).filter(|rest| !rest.is_empty())?.iter().take(GROUPS);
            let part = groups.filter_map(|(number, group)| at_peak(self.groups.get(*number), group.change_over(range)));
            return Some(part.collect());
        }
        let groups = self.groups.range(first, GROUPS)?.iter();
        let in_view = groups.filter(|GroupState { group, .. }| {
            let is_listed = group.is_in_program() || group.is_of_pool_only() && range.is_record();
            group.meter == *meter && is_listed
        });
        let part = in_view
            .filter_map(|state| at_peak(&state.group, range.change_of(&state.history, state.bytes.cast_signed())));
        Some(part.collect())
    }

    /// Releases a kept peak.
    pub fn release_peak(&mut self, under: ScopeId) {
        let Some(KeptRange { meter, account, range }) = self.kept_peaks.remove(&under) else { return };
        self.peaks(account, meter).0.release(&range);
        if let Some(account) = account {
            self.accounts.release(account);
        }
    }
}
