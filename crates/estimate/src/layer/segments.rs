//! Chooses the layers that run again in the backward pass.

use std::{collections::HashMap, rc::Rc};

use super::{Built, Layer};
use crate::{
    eager::Segments,
    error::{Error, Kind},
    settings::Checkpointing,
};

/// Returns the layers of a model that run again with this setting.
pub(crate) fn segments(checkpointing: &Checkpointing, layers: &[Rc<Built>]) -> Result<Segments, Error> {
    let invalid = |what: String| Err(Kind::Invalid(what).into());
    let mut sequences = Vec::new();
    let mut paths = Vec::new();
    walk(layers, String::new(), &mut sequences, &mut paths);
    let has_blocks = sequences.iter().any(|(_, layers)| layers.iter().any(is_block));
    match checkpointing {
        Checkpointing::Off => Ok(Segments::default()),
        Checkpointing::Blocks if layers.iter().any(has_block) => Ok(Segments { blocks: true, ..Segments::default() }),
        Checkpointing::Blocks => invalid("the model has no blocks that checkpointing could run again".to_owned()),
        Checkpointing::Layers(names) => {
            if let Some(name) = names.unused(&paths) {
                return invalid(format!("checkpointing: no layer has the name `{name}`"));
            }
            let layers = paths.into_iter().filter(|path| names.contains(path)).collect();
            Ok(Segments { layers, ..Segments::default() })
        }
        Checkpointing::Every(0) => invalid("checkpointing of every 0 blocks makes no sense".to_owned()),
        Checkpointing::Segments(0) => invalid("checkpointing with 0 segments makes no sense".to_owned()),
        Checkpointing::Every(_) | Checkpointing::Segments(_) | Checkpointing::SquareRoot => {
            // Without blocks, use the layers of the longest sequence as units.
            let longest = sequences.iter().map(|(_, layers)| layers.len()).max().unwrap_or(0);
            let mut groups = HashMap::new();
            for (path, layers) in sequences {
                let is_unit: Vec<_> = layers.iter().map(|layer| is_block(layer) || !has_blocks).collect();
                let units = is_unit.iter().filter(|is_unit| **is_unit).count();
                if units == 0 || (!has_blocks && layers.len() < longest) {
                    continue;
                }
                let of_path = around_others(&is_unit, &checkpointing.groups(units));
                check_beginnings(&path, layers, &of_path)?;
                groups.insert(path, of_path);
                if !has_blocks {
                    break;
                }
            }
            Ok(Segments { groups, ..Segments::default() })
        }
    }
}

/// Returns whether the layer is a block or contains one.
fn has_block(layer: &Rc<Built>) -> bool {
    is_block(layer) || layer.children.iter().chain(&layer.shortcut).any(has_block)
}

fn is_block(layer: &Rc<Built>) -> bool {
    matches!(layer.kind, Layer::Block { .. })
}

/// Checks that no group that runs again starts with a layer that overwrites its input: PyTorch's backward pass would
/// find another version of it.
fn check_beginnings(path: &str, layers: &[Rc<Built>], groups: &[(usize, bool)]) -> Result<(), Error> {
    let mut rest = layers;
    for (length, runs_again) in groups {
        let (group, others) = rest.split_at(*length);
        rest = others;
        if let Some(first) = group.first()
            && *runs_again
            && matches!(first.kind, Layer::Activation { in_place: true, .. })
        {
            let what =
                "it overwrites its input, which checkpointing keeps because a group begins here; choose other groups";
            let separator = if path.is_empty() { "" } else { "." };
            let layer = format!("{path}{separator}{}", first.name);
            return Err(Error::in_layer(layer, Kind::Invalid(what.to_owned())));
        }
    }
    Ok(())
}

/// Returns the groups of units in a sequence that also contains other layers. Each of these becomes a group that does
/// not run again. A group ends where another layer comes between its units.
fn around_others(is_unit: &[bool], groups: &[(usize, bool)]) -> Vec<(usize, bool)> {
    let mut all: Vec<(usize, bool)> = Vec::new();
    let mut units = groups.iter().enumerate().flat_map(|(number, (length, again))| vec![(number, *again); *length]);
    let mut last = None;
    for is_unit in is_unit {
        let unit = if *is_unit { units.next() } else { None };
        match (unit, all.last_mut()) {
            (Some(unit), Some(group)) if last == Some(unit) => group.0 += 1,
            (Some(unit), _) => all.push((1, unit.1)),
            (None, _) => all.push((1, false)),
        }
        last = unit;
    }
    all
}

/// Collects all sequences of layers with their paths, and the paths of all layers. Layers are not nested more deeply
/// than `build` allows.
fn walk<'a>(
    layers: &'a [Rc<Built>],
    path: String,
    sequences: &mut Vec<(String, &'a [Rc<Built>])>,
    paths: &mut Vec<String>,
) {
    for layer in layers {
        let separator = if path.is_empty() || layer.name.is_empty() { "" } else { "." };
        let inner = format!("{path}{separator}{}", layer.name);
        paths.push(inner.clone());
        match layer.kind {
            Layer::Sequential { .. } | Layer::Block { .. } => walk(&layer.children, inner, sequences, paths),
            Layer::EncoderDecoder { .. } => {
                for children in [&layer.children[..], &layer.shortcut[..]] {
                    walk(children, inner.clone(), sequences, paths);
                }
            }
            // Sequences inside other layers are not grouped. Only the paths of their layers are needed.
            _ => {
                let mut others = Vec::new();
                for children in [&layer.children[..], &layer.shortcut[..]] {
                    walk(children, inner.clone(), &mut others, paths);
                }
            }
        }
    }
    sequences.push((path, layers));
}
