//! Tokens that a model generates.

use serde::{Deserialize, Serialize};

/// Tokens that a language model generates after it has read its input, the prompt: `generate` of transformers.
///
/// The first token comes from the pass over the prompt (the phase `prefill`), every other token from a pass over the previous one
/// (the phase `decode`). Logits are computed for the last position only. All passes are run, so an estimate takes longer with more tokens.
///
/// ```
/// use gpumem_estimate::{Decode, KvCache, Step, models};
///
/// let decode = Decode { tokens: 8, cache: KvCache::Dynamic };
/// let estimate = Step { decode: Some(decode), ..Step::inference(1) }.estimate(&models::gpt2(32))?;
/// let phases: Vec<_> = estimate.phases.iter().map(|phase| phase.name).collect();
/// assert_eq!(phases, ["prefill", "decode"]);
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decode {
    /// The number of generated tokens. 0 is an error.
    pub tokens: u64,
    /// How the keys and values of earlier tokens are kept.
    #[serde(default)]
    pub cache: KvCache,
}

/// How attention keeps the keys and values of earlier tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvCache {
    /// `DynamicCache` of transformers: each pass joins the old keys with the new ones in a new tensor, so that a
    /// layer's keys exist twice for a moment. The same then happens to the values.
    #[default]
    Dynamic,
    /// `StaticCache`: the first pass allocates room for this many tokens. It is an error if the prompt and the tokens
    /// do not fit.
    Static(u64),
}
