//! Builds layers with parameters from their descriptions.

use std::{collections::HashMap, rc::Rc};

use gpumem_core::report::counted;

use super::{
    Attention, AttentionNames, Built, Embeddings, Experts, Function, Layer, Linear, Named, RunExperts, linear,
};
use crate::{
    Conv, Dtype, Eager, Error, Quantized, Result, Shape, Types, Window,
    eager::{Adapted, ParameterId, Role},
    ensure,
};

/// The maximum depth of nested layers. Without it, a hostile file could overflow the stack.
const DEEPEST: usize = 64;
/// The longest allowed path of a layer. Each layer and each part of an estimate stores one.
const LONGEST_PATH: usize = 500;

/// The parameters of a layer, and the layers inside it.
type Parts = (Vec<ParameterId>, Vec<Rc<Built>>);

/// The state while the layers of a model are being built.
struct Building<'a> {
    eager: &'a Eager,
    types: Types,
    /// The tables and weights that other layers may share, by path.
    weights: HashMap<String, ParameterId>,
    depth: usize,
    /// The length of the path of the open layers, in bytes.
    path: usize,
}

/// Builds layers and allocates their parameters, in the order of the layers.
pub(crate) fn build(eager: &Eager, layers: &[Named], types: Types) -> Result<Vec<Rc<Built>>> {
    Building { eager, types, weights: HashMap::new(), depth: 0, path: 0 }.all(layers)
}

impl Building<'_> {
    fn all(&mut self, layers: &[Named]) -> Result<Vec<Rc<Built>>> {
        layers.iter().map(|layer| self.one(layer)).collect()
    }

    fn one(&mut self, named: &Named) -> Result<Rc<Built>> {
        let eager = self.eager;
        self.depth += 1;
        self.path += named.name.len() + 1;
        let built = eager.memory.in_layer(&named.name, || {
            if !matches!(named.layer, Layer::Block { .. }) {
                return self.parts(named);
            }
            let (group, built) = eager.build_group(|| self.parts(named));
            Ok(Built { group, ..built? })
        });
        self.depth -= 1;
        self.path -= named.name.len() + 1;
        built.map(Rc::new)
    }

    fn parts(&mut self, named: &Named) -> Result<Built> {
        ensure(self.depth <= DEEPEST, || self.invalid(format!("layers are nested deeper than {DEEPEST}")))?;
        let fits = self.path <= LONGEST_PATH;
        ensure(fits, || Error::invalid(format!("the names of layers make a path of more than {LONGEST_PATH} bytes")))?;
        let (name, kind, adapted) = (named.name.clone(), named.layer.clone(), Adapted::default());
        let (parameters, children, shortcut) = (vec![], vec![], vec![]);
        let mut built = Built { name, kind, parameters, adapted, group: None, children, shortcut };
        match &mut built.kind {
            Layer::Sequential { layers }
            | Layer::Block { layers }
            | Layer::Branches { layers }
            | Layer::Product { layers }
            | Layer::Idle { layers }
            | Layer::Provide { layers, .. } => built.children = self.all(&std::mem::take(layers))?,
            Layer::Residual { layers, shortcut, .. } | Layer::EncoderDecoder { encoder: layers, decoder: shortcut } => {
                built.children = self.all(&std::mem::take(layers))?;
                built.shortcut = self.all(&std::mem::take(shortcut))?;
            }
            Layer::Conv(conv) => built.parameters = self.conv(conv)?,
            Layer::Linear(linear) => (built.parameters, built.adapted) = self.linear(linear)?,
            Layer::Embedding { rows, size } => {
                built.parameters = vec![self.add_table([*rows, *size])?];
                self.share(built.parameters[0]);
            }
            Layer::TiedEmbedding { tied_to } => built.parameters = vec![self.shared(tied_to)?],
            Layer::Embeddings(embeddings) => {
                let Embeddings { size, tokens, positions, segments, .. } = *embeddings;
                let rows = embeddings.table_names().into_iter().zip([tokens, positions, segments]).enumerate();
                let layer = |(_, (name, rows)): (_, (&str, u64))| Layer::Embedding { rows, size }.named(name);
                // The forward pass always reads the first table.
                let tables: Vec<_> = rows.filter(|(at, (_, rows))| *at == 0 || *rows > 0).map(layer).collect();
                built.children = self.all(&tables)?;
            }
            Layer::PatchEmbedding { channels, image, patch, size, as_clip } => {
                (built.parameters, built.children) = self.patches([*channels, *image, *patch, *size], *as_clip)?;
            }
            Layer::BatchNorm { channels } => {
                built.parameters = vec![self.add([*channels])?, self.add([*channels])?];
                let buffer = |shape: Shape, dtype| self.eager.add_tensor(Role::Buffer, &shape, [dtype; 2]);
                buffer([*channels].into(), Dtype::F32)?;
                buffer([*channels].into(), Dtype::F32)?;
                // This buffer counts the batches.
                buffer(Shape::default(), Dtype::I64)?;
            }
            Layer::Similarity { .. } => built.parameters = vec![self.add([])?],
            Layer::Positions { rows, size, is_fixed } => {
                let role = if *is_fixed { Role::Frozen } else { Role::Parameter };
                built.parameters =
                    vec![self.eager.add_tensor(role, &Shape::from([*rows, *size]), [self.types.others; 2])?];
            }
            Layer::LayerNorm { size } => built.parameters = vec![self.add([*size])?, self.add([*size])?],
            Layer::RmsNorm { size } | Layer::GemmaNorm { size } => built.parameters = vec![self.add([*size])?],
            Layer::ChannelScale { size } => built.parameters = vec![self.add([*size, 1, 1])?],
            Layer::Attention(attention) => (built.parameters, built.children) = self.attention(attention)?,
            Layer::Experts(experts) => (built.parameters, built.children) = self.experts(experts)?,
            Layer::Activation { function, in_place: true } if !matches!(function, Function::Relu | Function::Relu6) => {
                return Err(self.invalid(format!("{function:?} cannot overwrite its input")));
            }
            Layer::MaxPool(window) => {
                if window.stride.is_empty() {
                    window.stride.clone_from(&window.kernel);
                }
                self.spread(window)?;
            }
            _ => {}
        }
        Ok(built)
    }

    fn invalid(&self, what: impl Into<String>) -> Error {
        self.eager.invalid(what)
    }

    fn patches(&mut self, [inputs, image, patch, outputs]: [u64; 4], as_clip: bool) -> Result<Parts> {
        let side = image.checked_div(patch).unwrap_or(0);
        let patches = side.checked_mul(side).and_then(|patches| patches.checked_add(1));
        let patches = patches.ok_or_else(|| self.eager.too_large())?;
        let window = Window::square(patch, patch, 0);
        let convolution = Layer::Conv(Conv { inputs, outputs, window, no_bias: as_clip, ..Conv::default() });
        let mut parameters = vec![self.add([1, 1, outputs])?];
        let children = if as_clip {
            let positions = Layer::Embedding { rows: patches, size: outputs };
            self.all(&[convolution.named("patch_embedding"), positions.named("position_embedding")])?
        } else {
            parameters.push(self.add([1, patches, outputs])?);
            self.all(&[convolution.named("patch_embeddings.projection")])?
        };
        Ok((parameters, children))
    }

    fn conv(&mut self, conv: &mut Conv) -> Result<Vec<ParameterId>> {
        self.spread(&mut conv.window)?;
        conv.groups = conv.groups.max(1);
        let Conv { inputs, outputs, groups, .. } = *conv;
        let fits = inputs % groups == 0 && outputs % groups == 0;
        ensure(fits, || self.invalid(format!("{inputs} and {outputs} channels cannot be split into {groups} groups")))?;
        let mut sizes = vec![outputs, inputs / groups];
        sizes.extend(&conv.window.kernel);
        let mut parameters = vec![self.add(sizes)?];
        if !conv.no_bias {
            parameters.push(self.add([outputs])?);
        }
        Ok(parameters)
    }

    fn attention(&mut self, attention: &Attention) -> Result<Parts> {
        let Attention { size, heads, no_bias, no_output_bias, is_joined, .. } = *attention;
        let (of_keys, shown) = (attention.key_value_heads(), counted(heads, "head", "heads"));
        let fits = attention.head_size() != 0 && heads.checked_rem(of_keys) == Some(0);
        ensure(fits, || self.invalid(format!("{shown} cannot share {of_keys} heads of keys")))?;
        let fits = !is_joined || attention.reads.is_none();
        ensure(fits, || self.invalid("the projections of cross attention cannot be joined"))?;
        let (rotated, of) = (attention.rotated(), attention.head_size());
        ensure(rotated <= of, || self.invalid(format!("heads of {of} cannot rotate {rotated} elements")))?;
        let [queries, keys, values] = attention.widths().ok_or_else(|| self.eager.too_large())?;
        let AttentionNames { queries: q, keys: k, values: v, joined, output, norms: [q_norm, k_norm] } =
            &attention.names;
        let mut layers = if is_joined {
            let sum = queries.checked_add(keys).and_then(|sum| sum.checked_add(values));
            vec![linear(joined, size, sum.ok_or_else(|| self.eager.too_large())?, no_bias)]
        } else {
            vec![
                linear(q, size, queries, no_bias),
                linear(k, size, keys, no_bias || attention.no_key_bias),
                linear(v, size, values, no_bias),
            ]
        };
        layers.push(linear(output, queries, size, no_bias || no_output_bias));
        if let Some(norm) = attention.norm.layer(attention.head_size()) {
            layers.extend([norm.clone().named(q_norm.as_str()), norm.named(k_norm.as_str())]);
        }
        let children = self.all(&layers)?;
        let mut table = Vec::new();
        if attention.buckets > 0 {
            let add = || self.add([attention.buckets, heads]);
            table.push(self.eager.memory.in_layer("relative_attention_bias", add)?);
        }
        Ok((table, children))
    }

    fn linear(&mut self, linear: &Linear) -> Result<(Vec<ParameterId>, Adapted)> {
        let Linear { inputs, outputs, no_bias, tied_to } = linear;
        let adapted = self.eager.adapt(*inputs, *outputs, self.types.others, tied_to.is_some())?;
        let weight = match (tied_to, &adapted.in_4_bits) {
            (Some(path), _) => self.shared(path)?,
            (None, Some(weight)) => weight.packed,
            (None, None) => {
                let Types { weights, tables, others } = self.types;
                let is_head = weights != tables && Quantized::default().except.contains(&self.eager.memory.path());
                let stored = if is_head { tables } else { weights };
                self.eager.add_tensor(Role::Parameter, &Shape::from([*outputs, *inputs]), [stored, others])?
            }
        };
        if adapted.in_4_bits.is_none() {
            self.share(weight);
        }
        let mut parameters = vec![weight];
        if !no_bias {
            parameters.push(self.add([*outputs])?);
        }
        Ok((parameters, adapted))
    }

    /// Returns the weight of the layer at this path.
    fn shared(&self, path: &str) -> Result<ParameterId> {
        let unknown = || self.invalid(format!("no layer before it has the path `{path}` and a weight to share"));
        self.weights.get(path).copied().ok_or_else(unknown)
    }

    fn experts(&mut self, experts: &Experts) -> Result<Parts> {
        let Experts { size, hidden, experts: count, per_token, function, shared, run } = *experts;
        let fits = per_token != 0 && per_token <= count;
        ensure(fits, || self.invalid(format!("a token cannot pass through {per_token} of {count} experts")))?;
        let mut children = vec![self.one(&linear(experts.router(), size, count, true))?];
        let both = hidden.checked_mul(2).ok_or_else(|| self.eager.too_large())?;
        let [first, second] = match run {
            RunExperts::Grouped => [[count, both, size], [count, size, hidden]],
            RunExperts::All => [[count, size, both], [count, hidden, size]],
        };
        let add = || Ok(vec![self.add_table(first)?, self.add_table(second)?]);
        let parameters = self.eager.memory.in_layer("experts", add)?;
        if shared > 0 {
            let mlp = Layer::gated_mlp(size, shared, function);
            children.push(self.one(&mlp.named("shared_expert"))?);
            if run == RunExperts::Grouped {
                children.push(self.one(&linear("shared_expert_gate", size, 1, true))?);
            }
        } else if run == RunExperts::All {
            return Err(self.invalid("experts that all run need a shared expert"));
        }
        Ok((parameters, children))
    }

    fn add(&self, sizes: impl Into<Shape>) -> Result<ParameterId> {
        self.eager.add_tensor(Role::Parameter, &sizes.into(), [self.types.others; 2])
    }

    /// Adds the weights of experts, or a table of rows.
    fn add_table<const N: usize>(&self, sizes: [u64; N]) -> Result<ParameterId> {
        self.eager.add_tensor(Role::Parameter, &Shape::from(sizes), [self.types.tables, self.types.others])
    }

    /// Lets later layers share this weight.
    fn share(&mut self, weight: ParameterId) {
        self.weights.insert(self.eager.memory.path(), weight);
    }

    /// Expands the step and the padding of a window to one number for each dimension.
    fn spread(&self, window: &mut Window) -> Result<()> {
        let dimensions = window.kernel.len();
        for (sizes, default) in [(&mut window.stride, 1), (&mut window.padding, 0)] {
            if sizes.len() < 2 {
                *sizes = vec![sizes.first().copied().unwrap_or(default); dimensions];
            }
            if sizes.len() != dimensions || dimensions == 0 {
                let dimensions = counted(dimensions as u64, "dimension", "dimensions");
                return Err(self.invalid(format!("{} numbers were given for {dimensions}", sizes.len())));
            }
        }
        Ok(())
    }
}
