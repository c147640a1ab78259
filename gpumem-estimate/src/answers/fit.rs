//! The largest batch and the longest sequences that fit.

use crate::{
    error::{Error, Kind},
    model::{Input, Model},
    step::Step,
};

impl Step {
    /// Returns a batch with which the step does not need more than its limit, while batches that are up to 10 % larger do; 0 if none
    /// fits. It is found by bisection. Sometimes a larger batch needs less, because its blocks fit better into the segments of the
    /// allocator. So larger batches are tried as well, at most 16 of them.
    ///
    /// # Errors
    /// Returns an error if the step has no limit, or if the model and the step do not fit together.
    pub fn largest_batch(&self, model: &Model) -> Result<u64, Error> {
        self.check_limit()?;
        largest_with_gaps(|batch| fits(Self { batch, ..self.clone() }.estimate(model).map(drop)))
    }

    /// Returns the longest sequences with which the step does not need more than its limit, found as
    /// [`largest_batch`](Self::largest_batch) finds a batch; 0 if none fits. Sequences are not longer than a model's table of
    /// positions.
    ///
    /// # Errors
    /// Returns an error if the step has no limit, if the model does not read tokens, or if the model and the step do not fit together.
    pub fn largest_length(&self, model: &Model) -> Result<u64, Error> {
        self.check_limit()?;
        if !matches!(model.input, Input::Tokens(_)) {
            return Err(Kind::Invalid("the model does not read sequences of tokens".to_owned()).into());
        }
        largest_with_gaps(|length| {
            let model = Model { input: Input::Tokens(length), ..model.clone() };
            match self.estimate(&model) {
                Err(error) if error.is_too_long() => Ok(false),
                result => fits(result.map(drop)),
            }
        })
    }

    fn check_limit(&self) -> Result<(), Error> {
        let missing = || Kind::Invalid("what fits depends on a limit, and the step has none".to_owned());
        self.limit.map(drop).ok_or_else(|| missing().into())
    }
}

fn fits(result: Result<(), Error>) -> Result<bool, Error> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the result of [`largest`], improved by trying at most 16 larger numbers up to 10 % above it.
fn largest_with_gaps(mut fits: impl FnMut(u64) -> Result<bool, Error>) -> Result<u64, Error> {
    let mut found = largest(&mut fits)?;
    let mut next = found;
    while found > 0 && next < found.saturating_add(found.div_ceil(10)) {
        next = next.saturating_add(found.div_ceil(160));
        if fits(next)? {
            found = next;
        }
    }
    Ok(found)
}

/// Returns the largest number for which `fits` is true, by bisection: `fits` must be false for all numbers after the first that it
/// is false for. 0 if it is false for 1. It is for other sizes than the batch and the length of sequences.
///
/// # Errors
/// Returns the first error of `fits`.
pub fn largest(mut fits: impl FnMut(u64) -> Result<bool, Error>) -> Result<u64, Error> {
    let (mut fitting, mut too_large) = (0, 1);
    while fits(too_large)? {
        fitting = too_large;
        let Some(next) = too_large.checked_mul(2) else { return Ok(fitting) };
        too_large = next;
    }
    while too_large - fitting > 1 {
        let middle = fitting + (too_large - fitting) / 2;
        if fits(middle)? {
            fitting = middle;
        } else {
            too_large = middle;
        }
    }
    Ok(fitting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_passed() {
        // 18 does not fit, and 19 does.
        let with_gaps = |numbers: &[u64]| largest_with_gaps(|number| Ok(number <= 17 || numbers.contains(&number)));
        assert_eq!(with_gaps(&[]).unwrap(), 17);
        assert_eq!(with_gaps(&[19]).unwrap(), 19);
        assert_eq!(with_gaps(&[19, 21]).unwrap(), 21, "21 is within 10 % of 19");
        assert_eq!(with_gaps(&[30]).unwrap(), 17);
        assert_eq!(largest_with_gaps(|_| Ok(false)).unwrap(), 0);
        assert_eq!(largest_with_gaps(|number| Ok(number <= 10_000)).unwrap(), 10_000);
    }
}
