//! The largest batch and the longest sequences that fit.

use crate::{Bytes, Error, Input, Kind, Model, Result, Step, ensure};

impl Step {
    /// Returns a batch with which the step stays within its limit; 0 if none fits. The search finds a batch that fits
    /// while the next larger one does not. Sometimes a still larger batch needs less memory, because its blocks fit
    /// better into the allocator's segments. Therefore, at most 16 batches that are up to 10 % larger are tried as
    /// well, and the same again above each one that fits, unless the model has very many layers.
    ///
    /// # Errors
    /// Returns an error if the step has no limit, or if the model and the step do not fit together.
    pub fn largest_batch(&self, model: &Model) -> Result<u64> {
        let limit = self.check_limit()?;
        largest_in(limit, |batch| fitting(Self { batch, ..self.clone() }.peak(model)))
    }

    /// Returns the longest sequences with which the step stays within its limit; 0 if none fit. They are found in the
    /// same way as a batch in [`largest_batch`](Self::largest_batch), and are not longer than a model's table of
    /// positions.
    ///
    /// # Errors
    /// Returns an error if the step has no limit, if the model does not read tokens, or if the model and the step do
    /// not fit together.
    pub fn largest_length(&self, model: &Model) -> Result<u64> {
        let limit = self.check_limit()?;
        let fits = matches!(model.input, Input::Tokens(_));
        ensure(fits, || Error::invalid("the model does not read sequences of tokens"))?;
        largest_in(limit, |length| {
            let model = Model { input: Input::Tokens(length), ..model.clone() };
            match self.peak(&model) {
                Err(error) if matches!(error.kind(), Kind::TooLong { .. }) => Ok(None),
                result => fitting(result),
            }
        })
    }

    fn check_limit(&self) -> Result<Bytes> {
        self.limit.ok_or_else(|| Error::invalid("the largest step depends on a limit, and the step has none"))
    }
}

/// Returns the peak of a step that fits. `None` if the step does not fit.
fn fitting(result: Result<(u64, u64)>) -> Result<Option<(u64, u64)>> {
    match result {
        Ok(peak) => Ok(Some(peak)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

/// If a step has more events than this, it takes so long that no larger numbers are tried. A training step of a Llama with
/// 250 blocks has fewer.
const MANY_EVENTS: u64 = 260_000;

/// Returns the largest number that fits into a limit, improved by [`with_gaps`] unless a step is long.
fn largest_in(limit: Bytes, mut peak: impl FnMut(u64) -> Result<Option<(u64, u64)>>) -> Result<u64> {
    let Some((first, events)) = peak(1)? else { return Ok(0) };
    let found = largest(limit.get(), first, |number| Ok(peak(number)?.map(|(bytes, _)| bytes)))?;
    if events > MANY_EVENTS { Ok(found) } else { with_gaps(found, |number| Ok(peak(number)?.is_some())) }
}

/// Returns a number that fits while the next larger one does not. The peak grows roughly evenly with the number, so the
/// peaks found so far show where the limit is. `first` is the peak for 1.
fn largest(limit: u64, first: u64, mut peak: impl FnMut(u64) -> Result<Option<u64>>) -> Result<u64> {
    const FASTEST: u64 = 8;

    let ((mut before, mut peak_before), mut fitting, mut peak_of_fitting) = ((0, 0), 1_u64, first);
    let mut too_large = loop {
        let grown = u128::from(peak_of_fitting.saturating_sub(peak_before).max(1));
        let left = u128::from(limit.saturating_sub(peak_of_fitting)) * u128::from(fitting - before) / grown;
        let Some(most) = fitting.checked_mul(FASTEST) else { return Ok(fitting) };
        let next = u64::try_from(left).map_or(most, |left| fitting.saturating_add(left.max(1)).min(most));
        match peak(next)? {
            Some(bytes) => {
                ((before, peak_before), fitting, peak_of_fitting) = ((fitting, peak_of_fitting), next, bytes);
            }
            None => break next,
        }
    };
    // The result is close to the first number that does not fit. Once that is passed, the range is halved.
    let mut step = ((too_large - fitting) / 64).max(1);
    while too_large - fitting > 1 {
        let next = too_large.saturating_sub(step).max(fitting + (too_large - fitting) / 2);
        if peak(next)?.is_some() {
            (fitting, step) = (next, u64::MAX);
        } else {
            (too_large, step) = (next, step.saturating_mul(2));
        }
    }
    Ok(fitting)
}

/// Tries at most 16 larger numbers up to 10 % above the one that was found, and again above each that fits.
fn with_gaps(mut found: u64, mut fits: impl FnMut(u64) -> Result<bool>) -> Result<u64> {
    let mut next = found;
    while next < found.saturating_add(found.div_ceil(10)) {
        next = next.saturating_add(found.div_ceil(160));
        if fits(next)? {
            found = next;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_passed() {
        // 18 does not fit, and 19 does.
        let found = |numbers: &[u64]| with_gaps(17, |number| Ok(numbers.contains(&number))).unwrap();
        assert_eq!(found(&[]), 17);
        assert_eq!(found(&[19]), 19);
        assert_eq!(found(&[19, 21]), 21, "21 is within 10 % of 19");
        assert_eq!(found(&[30]), 17);
    }

    /// Finds the largest number whose peak is not above a limit of 10^9. Returns it, and how many numbers were tried.
    fn tried(peak: impl Fn(u64) -> u64) -> (u64, u32) {
        let mut tries = 0;
        let found = largest(1_000_000_000, peak(1), |number| {
            tries += 1;
            Ok(Some(peak(number)).filter(|peak| *peak <= 1_000_000_000))
        });
        (found.unwrap(), tries)
    }

    #[test]
    fn few_numbers_are_tried() {
        for most in [1, 2, 3, 14, 100, 7446, 100_000, 900_000_000] {
            // The peak grows evenly, in steps, ever faster, and with a constant part.
            let evenly = |number: u64| number.saturating_mul(1_000_000_000 / most);
            let shapes: [&dyn Fn(u64) -> u64; 4] = [
                &evenly,
                &|number| (evenly(number) >> 16).saturating_add(1) << 16,
                &|number| number.saturating_mul(number).saturating_mul(1_000_000_000) / (most * most),
                &|number| 900_000_000 + number * (100_000_000 / most),
            ];
            for (at, peak) in shapes.into_iter().enumerate() {
                if peak(1) > 1_000_000_000 || peak(u64::from(u32::MAX)) <= 1_000_000_000 {
                    continue;
                }
                let (found, tries) = tried(peak);
                assert!(peak(found) <= 1_000_000_000 && peak(found + 1) > 1_000_000_000, "{most}, {at}: {found}");
                assert!(tries <= 45, "{most}, {at}: {tries}");
            }
        }
        let (found, tries) = tried(|number| 300_000_000 + number * 94_000);
        assert!(found == 7446 && tries < 12, "{found}, {tries}");
    }
}
