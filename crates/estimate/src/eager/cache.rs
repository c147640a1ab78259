//! The keys and values that attention keeps while a model generates tokens.

use gpumem_core::report::counted;

use super::KeptTokens;
use crate::{Class, Eager, KvCache, Result, Tensor, ensure};

impl Eager {
    /// Starts a pass over the next tokens. Its layers find the keys and values of earlier passes.
    pub(crate) fn start_pass(&self) {
        self.next_kept.set(0);
        self.free_shared();
    }

    /// Joins the keys and values of earlier tokens, (batch, heads, n, size), with new ones, like `Cache.update` of
    /// transformers. With a window, all are returned, but only the last `window - 1` tokens are kept.
    pub(crate) fn append_to_cache(&self, keys: &Tensor, values: &Tensor, window: Option<u64>) -> Result<[Tensor; 2]> {
        let number = self.next_kept.replace(self.next_kept.get() + 1);
        if self.cache.borrow().len() == number {
            self.cache.borrow_mut().push(KeptTokens::default());
        }
        let cache = self.step.decode.as_ref().map(|decode| decode.cache).unwrap_or_default();
        self.memory.with_class(Class::Cache, || match cache {
            KvCache::Dynamic => self.joined(number, keys, values, window),
            KvCache::Static(room) => self.placed(number, keys, values, room),
        })
    }

    /// Runs `DynamicLayer.update`: `torch.cat` of the keys, and then of the values. The first tensor is empty and has
    /// the type of the keys.
    fn joined(&self, number: usize, keys: &Tensor, values: &Tensor, window: Option<u64>) -> Result<[Tensor; 2]> {
        let old = self.cache.borrow_mut()[number].kept.take();
        let (old_keys, old_values) = old.map(|[keys, values]| (keys, values)).unzip();
        let join = |old: &Option<Tensor>, new: &Tensor| match old {
            Some(old) => self.concatenate(&[old, new], 2),
            None if new.dtype == keys.dtype => self.concatenate(&[new], 2),
            None => self.to(new, keys.dtype),
        };
        let all_keys = join(&old_keys, keys)?;
        // Without a window, the new keys are assigned to the variable of the old ones, which frees these.
        let old_keys = old_keys.filter(|_| window.is_some());
        let all_values = join(&old_values, values)?;
        drop((old_keys, old_values));
        let kept = |all: &Tensor| match window {
            // A view of the last tokens keeps the memory of all tokens alive.
            Some(window) if all.shape[2] >= window.max(1) => self.narrow(all, 2, window.max(1) - 1),
            _ => all.clone(),
        };
        self.cache.borrow_mut()[number].kept = Some([kept(&all_keys), kept(&all_values)]);
        Ok([all_keys, all_values])
    }

    /// Writes into tensors with room for all tokens (`StaticLayer.update`).
    fn placed(&self, number: usize, keys: &Tensor, values: &Tensor, room: u64) -> Result<[Tensor; 2]> {
        let allocate = |like: &Tensor| self.empty(&like.shape.with(2, room), keys.dtype, Class::Cache);
        let mut layers = self.cache.borrow_mut();
        let layer = &mut layers[number];
        let new = keys.shape[2];
        let is_first = layer.tokens == 0;
        layer.tokens = layer.tokens.saturating_add(new);
        let (kept, shown) = (layer.tokens, counted(room, "token", "tokens"));
        ensure(kept <= room, || self.invalid(format!("a cache with room for {shown} cannot keep {kept}")))?;
        let both = match &layer.kept {
            Some(kept) => kept.clone(),
            None => layer.kept.insert([allocate(keys)?, allocate(values)?]).clone(),
        };
        // `sdpa_attention_forward` uses the part that contains tokens, in the first pass.
        Ok(if is_first { both.map(|kept| self.narrow(&kept, 2, new)) } else { both })
    }

    /// Drops all keys and values.
    pub(crate) fn free_cache(&self) {
        drop(self.cache.take());
        self.start_pass();
    }
}
