//! Several ranks: `fully_shard` (FSDP2), `DistributedDataParallel` and `ZeroRedundancyOptimizer`. Comments name the
//! functions in `torch/distributed/fsdp/_fully_shard/`.

use std::{cmp::Reverse, rc::Rc};

use super::{
    BlockRun, Eager, ParameterGroup, Shard, Tensor,
    parameters::{Updated, trainable},
};
use crate::{Class, DataParallel, DataParallelKind, Dtype, Result, Shape, memory::Storage};

/// The group of the parameters outside all blocks.
pub(crate) const ROOT: usize = 0;

/// `dist._DEFAULT_FIRST_BUCKET_BYTES` and the default of `bucket_cap_mb` of `DistributedDataParallel`.
const BUCKETS: [u64; 2] = [1 << 20, 25 << 20];

impl Eager {
    fn shards(&self) -> Option<DataParallel> {
        self.step.data_parallel.filter(|parallel| parallel.kind.has_shards())
    }

    /// Runs the function that builds a block. Returns the block's group of parameters, if blocks have groups.
    pub(crate) fn build_group<R>(&self, build: impl FnOnce() -> R) -> (Option<usize>, R) {
        if self.shards().is_none() {
            return (None, build());
        }
        let number = self.sharding.groups.borrow().len();
        self.sharding.groups.borrow_mut().push(ParameterGroup::default());
        let before = self.sharding.building.replace(number);
        let result = build();
        self.sharding.building.set(before);
        (Some(number), result)
    }

    /// Returns the shard of a parameter, and the parameter without memory (`_init_sharded_param`). `None` if each rank
    /// has the whole parameter.
    pub(super) fn sharded(&self, number: usize, shape: &Shape, dtype: Dtype) -> Result<Option<(Tensor, Shard)>> {
        let Some(parallel) = self.shards() else { return Ok(None) };
        let Some(rows) = shape.sizes().first() else {
            return Err(self.invalid("a parameter without dimensions cannot be split"));
        };
        // `torch.chunk`: all shards except the last ones have as many rows as the first one.
        let tensor = self.empty(&shape.with(0, rows.div_ceil(parallel.ranks)), dtype, Class::Weights)?;
        let elements = tensor.shape.elements().and_then(|elements| elements.checked_mul(parallel.ranks));
        let gathered = parallel.gathered.unwrap_or(dtype);
        let whole_bytes = elements.and_then(|elements| gathered.bytes(elements));
        let whole_bytes = whole_bytes.ok_or_else(|| self.too_large())?;
        let whole = Tensor::new(Rc::new(Storage::new(&self.memory)), shape.clone(), gathered);
        self.sharding.groups.borrow_mut()[self.sharding.building.get()].parameters.push(number);
        Ok(Some((whole, Shard { tensor, gradient: None, whole_bytes })))
    }

    /// Runs a block, or the whole model, with its parameters: `pre_forward`, and `post_forward`.
    pub(crate) fn in_group(
        &self,
        group: usize,
        input: &Tensor,
        run: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        // A block that runs again already has its parameters, because the hook of its output ran before.
        let runs_again = matches!(*self.checkpointing.borrow(), Some(BlockRun::Again(_)));
        let Some(parallel) = self.shards().filter(|_| !runs_again) else { return run(input) };
        self.gather(group)?;
        self.copy_out(group, true)?;
        let input = match parallel.gathered {
            Some(dtype) if input.dtype.is_float() => self.to(input, dtype)?,
            _ => input.clone(),
        };
        let output = if self.needs_grad(&[&input]) {
            // `RegisterPostBackwardFunction`.
            let [input] = self.record(&[&input], [input.detached()], move |eager, grads| {
                eager.reduce(group)?;
                Ok(grads.to_vec())
            });
            run(&input)?
        } else {
            run(&input)?
        };
        drop(input);
        if parallel.kind == DataParallelKind::Zero3 && group != ROOT {
            self.free_gathered(group);
        }
        self.sharding.order.borrow_mut().push(group);
        if group == ROOT {
            drop(self.sharding.gathered.take());
        }
        if !self.needs_grad(&[&output]) {
            return Ok(output);
        }
        let [output] = self.record(&[&output], [output.detached()], move |eager, grads| {
            // `pre_backward`, and `_backward_prefetch`.
            eager.gather(group)?;
            eager.copy_out(group, false)?;
            let order = eager.sharding.order.borrow();
            if let Some(at @ 1..) = order.iter().rposition(|other| *other == group) {
                eager.gather(order[at - 1])?;
            }
            Ok(grads.to_vec())
        });
        Ok(output)
    }

    /// Gathers the parameters of a group: `unshard`, `foreach_all_gather`.
    fn gather(&self, group: usize) -> Result<()> {
        let Some(parallel) = self.shards() else { return Ok(()) };
        let (elements, dtype, is_needed) = {
            let groups = self.sharding.groups.borrow();
            let group = &groups[group];
            let (elements, dtype) = self.elements_of_shards(&group.parameters);
            (elements, dtype, group.pending.is_none() && !group.is_gathered && !group.parameters.is_empty())
        };
        if !is_needed {
            return Ok(());
        }
        let buffer = |elements, dtype| self.empty(&Shape::from([elements]), dtype, Class::Communication);
        // `flat_foreach_copy_input`.
        let converted = parallel.gathered.map(|dtype| buffer(elements, dtype)).transpose()?;
        let output = buffer(elements.saturating_mul(parallel.ranks), parallel.gathered.unwrap_or(dtype))?;
        drop(converted);
        self.sharding.groups.borrow_mut()[group].pending = Some(output);
        Ok(())
    }

    /// Copies the gathered parameters out: `wait_for_unshard`, `foreach_all_gather_copy_out`.
    fn copy_out(&self, group: usize, is_forward: bool) -> Result<()> {
        let Some(gathered) = self.sharding.groups.borrow_mut()[group].pending.take() else { return Ok(()) };
        if is_forward {
            drop(self.sharding.gathered.take());
        }
        for number in self.sharding.groups.borrow()[group].parameters.iter().copied() {
            let (storage, bytes) = self.whole(number);
            storage.fill(bytes, Class::Weights)?;
        }
        self.sharding.groups.borrow_mut()[group].is_gathered = true;
        if is_forward {
            // The buffer is freed after the next group has been copied out.
            self.sharding.gathered.replace(Some(gathered));
        }
        Ok(())
    }

    /// Frees the gathered parameters of a group: `reshard`.
    fn free_gathered(&self, group: usize) {
        let mut groups = self.sharding.groups.borrow_mut();
        groups[group].is_gathered = false;
        let numbers = groups[group].parameters.clone();
        drop(groups);
        for number in numbers {
            self.whole(number).0.free();
        }
    }

    /// Adds up the gradients of a group: `post_backward`, `foreach_reduce`.
    fn reduce(&self, group: usize) -> Result<()> {
        let Some(parallel) = self.shards() else { return Ok(()) };
        if std::mem::replace(&mut self.sharding.groups.borrow_mut()[group].is_reduced, true) {
            return Ok(());
        }
        let numbers = self.sharding.groups.borrow()[group].parameters.clone();
        let with_gradient: Vec<_> = numbers
            .into_iter()
            .filter_map(|number| Some((number, self.parameters.borrow_mut()[number].grad.take()?)))
            .collect();
        self.free_gathered(group);
        let Some(dtype) = with_gradient.first().map(|(_, gradient)| gradient.dtype) else { return Ok(()) };
        drop(self.sharding.reduced.take());
        let (numbers, gradients): (Vec<_>, Vec<_>) = with_gradient.into_iter().unzip();
        let (elements, shard_dtype) = self.elements_of_shards(&numbers);
        let buffer = |elements, dtype, class| self.empty(&Shape::from([elements]), dtype, class);
        let input = buffer(elements.saturating_mul(parallel.ranks), dtype, Class::Communication)?;
        drop(gradients);
        let mut output = buffer(elements, dtype, Class::Gradients)?;
        if dtype != shard_dtype {
            output = buffer(elements, shard_dtype, Class::Gradients)?;
        }
        for number in numbers {
            if let Some(shard) = &mut self.parameters.borrow_mut()[number].shard {
                // A later gradient is added in place.
                shard.gradient.get_or_insert_with(|| output.as_view());
            }
        }
        self.sharding.reduced.replace(Some(input));
        Ok(())
    }

    /// Finishes groups whose input needs no gradient, such as the root: `_root_post_backward_final_callback`.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        let count = self.sharding.groups.borrow().len();
        for group in 0..count {
            self.reduce(group)?;
            self.sharding.groups.borrow_mut()[group].is_reduced = false;
            self.sharding.groups.borrow_mut()[group].pending = None;
        }
        drop(self.sharding.reduced.take());
        self.sharding.order.borrow_mut().clear();
        Ok(())
    }

    fn elements_of_shards(&self, numbers: &[usize]) -> (u64, Dtype) {
        let all = self.parameters.borrow();
        let shards = numbers.iter().filter_map(|number| all[*number].shard.as_ref());
        let dtype = shards.clone().next().map_or(Dtype::F32, |shard| shard.tensor.dtype);
        (shards.filter_map(|shard| shard.tensor.shape.elements()).sum(), dtype)
    }

    fn whole(&self, number: usize) -> (Rc<Storage>, u64) {
        let all = self.parameters.borrow();
        let bytes = all[number].shard.as_ref().map_or(0, |shard| shard.whole_bytes);
        (Rc::clone(&all[number].tensor.storage), bytes)
    }

    /// Allocates the buckets of `DistributedDataParallel`: `compute_bucket_assignment_by_size` of the parameters in
    /// reverse order, with one open bucket for each type. Without `gradient_as_bucket_view`, buckets take memory in
    /// addition to the gradients.
    pub(crate) fn make_buckets(&self) -> Result<()> {
        let is_replicated = self.step.data_parallel.is_some_and(|parallel| !parallel.kind.has_shards());
        if !is_replicated {
            return Ok(());
        }
        let mut open: Vec<(Dtype, u64, usize)> = Vec::new();
        let mut closed = Vec::new();
        let all = self.parameters.borrow();
        let parameters: Vec<_> = trainable(&all).collect();
        for Updated { tensor, .. } in parameters.into_iter().rev() {
            let dtype = tensor.dtype;
            let bytes = tensor.shape.elements().and_then(|elements| dtype.bytes(elements)).unwrap_or(0);
            let at = open.iter().position(|(of, ..)| *of == dtype).unwrap_or_else(|| {
                open.push((dtype, 0, 0));
                open.len() - 1
            });
            let (_, sum, limit) = &mut open[at];
            *sum += bytes;
            if *sum >= BUCKETS[*limit] {
                closed.push(std::mem::take(sum));
                *limit = 1;
            }
        }
        closed.extend(open.into_iter().map(|(_, sum, _)| sum).filter(|sum| *sum > 0));
        for bytes in closed {
            let bucket = self.empty(&Shape::from([bytes]), Dtype::U8, Class::Communication)?;
            self.sharding.buckets.borrow_mut().push(bucket);
        }
        Ok(())
    }

    /// Distributes parameters like `ZeroRedundancyOptimizer._partition_parameters`: starting with the largest, each one
    /// goes to the rank with the fewest elements. Returns for each parameter whether the rank with the most elements
    /// updates it.
    pub(super) fn partition(&self, sizes: &[u64]) -> Option<Vec<bool>> {
        let parallel = self.step.data_parallel.filter(|parallel| parallel.kind == DataParallelKind::Zero1)?;
        // If there are more ranks than parameters, the others get none.
        let ranks = usize::try_from(parallel.ranks).unwrap_or(usize::MAX).min(sizes.len()).max(1);
        let mut largest_first: Vec<_> = (0..sizes.len()).collect();
        largest_first.sort_by_key(|at| Reverse(sizes[*at]));
        let (mut sums, mut rank_of) = (vec![0_u64; ranks], vec![0; sizes.len()]);
        for at in largest_first {
            let rank = (0..ranks).min_by_key(|rank| sums[*rank]).unwrap_or(0);
            sums[rank] += sizes[at];
            rank_of[at] = rank;
        }
        let most = (0..ranks).max_by_key(|rank| (sums[*rank], Reverse(*rank))).unwrap_or(0);
        Some(rank_of.into_iter().map(|rank| rank == most).collect())
    }
}
