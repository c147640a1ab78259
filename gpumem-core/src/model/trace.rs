use super::{ByteDelta, Bytes, Gauge, Sampling, Source};

/// What a trace comes to at one reading.
///
/// With S in use at the start (or the last reset), E at the reading and P the most in use in between, both ends
/// folded in: `used = E − S`, `peaked = P − max(S, E)`. So `peaked` is the memory that was needed on top of what
/// stayed, it is never negative, and `P − S = max(used, 0) + peaked`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trace {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// The device is a simulated one.
    pub simulated: bool,
    /// How far the numbers can be trusted.
    pub gauge: Gauge,
    /// What the numbers come from.
    pub source: Source,
    /// More in use than at the start; negative when memory was given back.
    pub used: ByteDelta,
    /// Needed at the worst moment on top of what stayed.
    pub peaked: Bytes,
    /// How well it was sampled; `None` unless the gauge is [`Gauge::Sampled`].
    pub sampling: Option<Sampling>,
    /// The device could not be read at this reading, or at the start: the numbers are those of the readings that were
    /// good. Reports print `?`.
    pub stale: bool,
    /// While it was open, a trace of another thread was open on the same device, and this one counts the whole process: the numbers
    /// may include what the other thread allocated. Reports say so. Always `false` of a trace that counts one thread.
    pub overlapped: bool,
    /// Frees, while the trace was open, of blocks whose size nobody knows, in the whole process: blocks that are older than
    /// the first trace and could not be looked up. Not 0: `used` may be too high.
    pub untracked: u64,
    /// Events that could not be counted while the trace was open, in the whole process, and functions of the driver that another
    /// tool took from gpumem, so that calls may be missing; of a [`Gauge::Pool`] trace, how often somebody else reset the pool's
    /// mark or changed the pool. Not 0: the numbers may be wrong.
    pub lost: u64,
}

impl Trace {
    /// `P − S`: the most that was in use on top of the start, whatever was given back since.
    pub fn peak_over_start(&self) -> Bytes {
        Bytes::new(self.used.get().max(0).unsigned_abs()) + self.peaked
    }

    /// The numbers say something: the gauge was on and the last reading worked.
    pub fn is_measured(&self) -> bool {
        self.gauge != Gauge::Off && !self.stale
    }

    /// This trace and one that began at its last reading, as one.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let over_start = |trace: &Self| trace.peak_over_start().get().cast_signed();
        let used = self.used.get().saturating_add(next.used.get());
        let peak = over_start(&self).max(self.used.get().saturating_add(over_start(&next)));
        let sampling = self.sampling.zip(next.sampling).map(|(first, second)| Sampling {
            every: first.every,
            readings: first.readings + second.readings - 1,
            longest_gap: first.longest_gap.max(second.longest_gap),
        });
        Self {
            used: ByteDelta::new(used),
            peaked: Bytes::new((peak - used.max(0)).unsigned_abs()),
            sampling,
            stale: self.stale || next.stale,
            overlapped: self.overlapped || next.overlapped,
            untracked: self.untracked.saturating_add(next.untracked),
            lost: self.lost.saturating_add(next.lost),
            ..self
        }
    }

    /// Figures that could not be read, under this gauge.
    #[doc(hidden)]
    pub fn stale(device: u32, gauge: Gauge) -> Self {
        Self { stale: true, gauge, ..Self::off(device) }
    }

    /// The figures of a trace that measures nothing.
    #[doc(hidden)]
    pub fn off(device: u32) -> Self {
        Self {
            device,
            simulated: false,
            gauge: Gauge::Off,
            source: Source::Off,
            used: ByteDelta::ZERO,
            peaked: Bytes::ZERO,
            sampling: None,
            stale: false,
            overlapped: false,
            untracked: 0,
            lost: 0,
        }
    }
}
