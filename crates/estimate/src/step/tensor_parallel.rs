//! Tensor parallelism: the part of a model that one rank runs, split as in Megatron-LM.

use gpumem_core::report::counted;

use crate::{
    error::{Error, Kind},
    layer::{Layer, Linear, Named},
    model::{Loss, Model},
};

/// `make_vocab_size_divisible_by` of Megatron-LM.
const VOCABULARY: u64 = 128;

/// The singular and the plural name of the elements between the two linear layers of an MLP.
const INNER: [&str; 2] = ["element between its layers", "elements between its layers"];

/// Returns the model of one of this many ranks.
///
/// Attention is split by heads, and an MLP by the size between its layers: the first matrix products by columns
/// (`ColumnParallelLinear`), the last by rows (`RowParallelLinear`, whose bias is on each rank). The table of tokens
/// and the head are split by tokens: each rank gets the same number, a multiple of 128. Everything else is on each
/// rank. Results are added up in place (`_reduce`), which needs no memory.
pub(super) fn of_one_rank(model: &Model, ranks: u64) -> Result<Model, Error> {
    let mut part = model.clone();
    let has_head = model.loss != Loss::CrossEntropy;
    let vocabulary = head(&mut part.layers).filter(|_| has_head).map_or(0, |head| head.outputs);
    let mut splitting = Splitting { ranks, vocabulary, is_split: false };
    for layer in &mut part.layers {
        splitting.layer(layer, "")?;
    }
    if let Some(head) = head(&mut part.layers).filter(|_| has_head) {
        head.outputs = splitting.tokens(vocabulary)?;
    }
    if !splitting.is_split {
        let what = "the model has no attention and no MLP in a block that tensor parallelism could split";
        return Err(Kind::Invalid(what.to_owned()).into());
    }
    Ok(part)
}

/// Returns the last layer, if it is a matrix product.
fn head(layers: &mut [Named]) -> Option<&mut Linear> {
    match &mut layers.last_mut()?.layer {
        Layer::Linear(head) => Some(head),
        Layer::Sequential { layers } => head(layers),
        _ => None,
    }
}

struct Splitting {
    ranks: u64,
    /// The size of the vocabulary; 0 if the model has no head for tokens.
    vocabulary: u64,
    is_split: bool,
}

impl Splitting {
    fn layer(&mut self, named: &mut Named, path: &str) -> Result<(), Error> {
        let separator = if path.is_empty() || named.name.is_empty() { "" } else { "." };
        let path = format!("{path}{separator}{}", named.name);
        match &mut named.layer {
            Layer::Block { layers } => {
                for layer in layers.iter_mut() {
                    self.layer(layer, &path)?;
                }
                let mut leaves = Vec::new();
                for layer in layers {
                    collect_leaves(layer, &path, &mut leaves);
                }
                self.pairs(&mut leaves)?;
            }
            Layer::Sequential { layers } | Layer::Branches { layers } => {
                for layer in layers {
                    self.layer(layer, &path)?;
                }
            }
            Layer::Residual { layers, shortcut, .. } => {
                for layer in layers.iter_mut().chain(shortcut) {
                    self.layer(layer, &path)?;
                }
            }
            Layer::Attention(attention) => {
                let (heads, keys, size) = (attention.heads, attention.key_value_heads(), attention.head_size());
                attention.heads = self.split(heads, ["head", "heads"], &path)?;
                attention.key_value_heads = self.split(keys, ["head of keys", "heads of keys"], &path)?;
                attention.head_size = size;
            }
            Layer::GatedMlp { hidden, .. } => *hidden = self.split(*hidden, INNER, &path)?,
            Layer::Embedding { rows, .. } if *rows == self.vocabulary => *rows = self.tokens(*rows)?,
            Layer::Embeddings(embeddings) if embeddings.tokens == self.vocabulary => {
                embeddings.tokens = self.tokens(embeddings.tokens)?;
            }
            Layer::Experts(_) | Layer::RelativeAttention(_) | Layer::EncoderDecoder { .. } => {
                let what =
                    "tensor parallelism is not modelled for experts and for models with an encoder and a decoder";
                return Err(Error::in_layer(path, Kind::Invalid(what.to_owned())));
            }
            _ => {}
        }
        Ok(())
    }

    /// Splits the linear layers of an MLP: a linear layer whose output goes through an activation into another linear
    /// layer with this many inputs.
    fn pairs(&mut self, leaves: &mut [(String, &mut Layer)]) -> Result<(), Error> {
        let mut first: Option<usize> = None;
        let mut has_activation = false;
        for at in 0..leaves.len() {
            let inputs = match &leaves[at].1 {
                Layer::Linear(Linear { inputs, .. }) => *inputs,
                Layer::Activation { .. } => {
                    has_activation = true;
                    continue;
                }
                Layer::Dropout { .. } => continue,
                _ => {
                    first = None;
                    continue;
                }
            };
            let before = first.filter(|first| {
                has_activation && matches!(&leaves[*first].1, Layer::Linear(linear) if linear.outputs == inputs)
            });
            let Some(before) = before else {
                (first, has_activation) = (Some(at), false);
                continue;
            };
            let part = self.split(inputs, INNER, &leaves[at].0)?;
            if let Layer::Linear(linear) = &mut *leaves[before].1 {
                linear.outputs = part;
            }
            if let Layer::Linear(linear) = &mut *leaves[at].1 {
                linear.inputs = part;
            }
            first = None;
        }
        Ok(())
    }

    fn split(&mut self, count: u64, [one, many]: [&str; 2], path: &str) -> Result<u64, Error> {
        self.is_split = true;
        if count.checked_rem(self.ranks) == Some(0) {
            return Ok(count / self.ranks);
        }
        let what = format!("{} cannot be split over {} ranks", counted(count, one, many), self.ranks);
        Err(Error::in_layer(path.to_owned(), Kind::Invalid(what)))
    }

    /// Returns the number of tokens that one rank gets.
    fn tokens(&self, all: u64) -> Result<u64, Error> {
        let parts = self.ranks.checked_mul(VOCABULARY).ok_or(Kind::TooLarge)?;
        all.div_ceil(parts).checked_mul(VOCABULARY).ok_or_else(|| Kind::TooLarge.into())
    }
}

/// Collects the layers of a block that have no layers inside, in the order in which they run.
fn collect_leaves<'a>(named: &'a mut Named, path: &str, leaves: &mut Vec<(String, &'a mut Layer)>) {
    let separator = if path.is_empty() || named.name.is_empty() { "" } else { "." };
    let path = format!("{path}{separator}{}", named.name);
    match &mut named.layer {
        Layer::Sequential { layers } | Layer::Residual { layers, .. } | Layer::Branches { layers } => {
            for layer in layers {
                collect_leaves(layer, &path, leaves);
            }
        }
        layer => leaves.push((path, layer)),
    }
}
