//! What templates of models that predict the next token cannot say: values that follow from several fields by a rule of their own,
//! and values that differ from block to block.
//!
//! The field `decoder` of a record, here called its parts, says how they follow:
//!
//! - `rotates_part` is the field with the part of a head that is rotated. Without it, all of it is.
//! - `is_capped` is true if scores and logits are limited when a configuration does not have the fields of the limits.
//! - `experts` is true if blocks have experts in place of the MLP: each n-th block, where the field `expert_step` says n, unless the
//!   field `expert_list` lists them.
//! - `rotation_list` names the field that says for each block whether it rotates. Without that field, every n-th block does not rotate, and
//!   `rotation_step` names the field with n.
//! - `slides` says which blocks have a window, `window_field` is its field, and `default_window` its default.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::fields::{Fields, head_size, is_zero, wrong};
use crate::{Result, ensure};

/// Values by the names that templates use.
pub(super) type Values = Vec<(&'static str, Value)>;

/// Returns the values for the whole model. `parts` is the field `decoder` of its record.
pub(super) fn values(parts: &Map<String, Value>, fields: Fields<'_>) -> Result<Values> {
    let (size, heads) = (fields.number("hidden_size", 0)?, fields.number("num_attention_heads", 0)?);
    let head_size = fields.optional("head_dim")?.map_or_else(|| head_size(size, heads), Ok)?;
    let rotated = part(parts, "rotates_part").map_or(Ok(0), |field| rotated(fields, field, head_size))?;
    // `null` means that nothing is limited.
    let is_capped = |field| fields.get(field).map_or(parts["is_capped"] == true, |value| !value.is_null());
    // Gemma 1 uses the field `hidden_act`, in which `gelu` also meant the form with `tanh`.
    let is_known = fields.get("hidden_activation").is_some_and(|value| !value.is_null());
    let function = fields.function(if is_known { "hidden_activation" } else { "hidden_act" }, "silu")?;
    Ok(vec![
        ("head_size", head_size.into()),
        ("rotated", rotated.into()),
        ("caps_scores", is_capped("attn_logit_softcapping").into()),
        ("caps_logits", is_capped("final_logit_softcapping").into()),
        ("function", json!(function)),
    ])
}

/// Returns the values for each block.
pub(super) fn of_blocks(parts: &Map<String, Value>, fields: Fields<'_>) -> Result<Vec<Values>> {
    let count = Fields::blocks("num_hidden_layers", fields.number("num_hidden_layers", 0)?)?;
    // The list contains 1 for each layer that rotates. An empty list is ignored.
    let list = part(parts, "rotation_list").map_or(Ok(None), |field| fields.numbers(field))?;
    let every = part(parts, "rotation_step").map_or(Ok(None), |field| fields.optional(field))?.unwrap_or(0);
    let rotates: Vec<bool> = match list.filter(|list| !list.is_empty()) {
        Some(list) => list.into_iter().map(|rotates| rotates != 0).collect(),
        None => (1..=count as u64).map(|at| !at.is_multiple_of(every)).collect(),
    };
    check_length(part(parts, "rotation_list").unwrap_or_default(), rotates.len(), count)?;
    let step = part(parts, "expert_step").map_or(Ok(None), |field| fields.optional(field))?.unwrap_or(1);
    let set = |numbers: Vec<u64>| numbers.into_iter().collect::<HashSet<_>>();
    let plain = fields.numbers("mlp_only_layers")?.map(set).unwrap_or_default();
    let chosen = part(parts, "expert_list").map_or(Ok(None), |field| fields.numbers(field))?.map(set);
    let has_experts = |at: u64| match &chosen {
        Some(chosen) => chosen.contains(&at),
        None => (at + 1).is_multiple_of(step) && !plain.contains(&at),
    };
    let windows = windows(parts, fields, &rotates[..count])?;
    let blocks = (0..).zip(windows).zip(rotates).map(|((at, window), rotates)| {
        let has_experts = parts["experts"] == true && has_experts(at);
        vec![("window", window.into()), ("rotates", rotates.into()), ("has_experts", has_experts.into())]
    });
    Ok(blocks.collect())
}

fn part<'a>(parts: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    parts.get(name)?.as_str()
}

/// Returns the number of elements of a head that are rotated. The factor may be in one of two fields.
fn rotated(fields: Fields<'_>, field: &str, head_size: u64) -> Result<u64> {
    let factor = fields.fraction(field, 1.0)?;
    let factor = fields.inner("rope_parameters").fraction("partial_rotary_factor", factor)?;
    ensure((0.0..=1.0).contains(&factor), || wrong(format!("`{field}` is {factor}, which is not between 0 and 1")))?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "as `int`"
    )]
    Ok((head_size as f64 * factor) as u64)
}

/// Returns the window of each layer; 0 for none. `slides` of a record names the layers that have one: `none`, `all`, those from
/// `max_window_layers` on (`last`), `every_second`, `all_but_each` n-th, where n is `sliding_window_pattern`, or those that are
/// `rotated`. Unless it is `none` or `all`, the list `layer_types` of a configuration decides if there is one.
fn windows(parts: &Map<String, Value>, fields: Fields<'_>, rotates: &[bool]) -> Result<Vec<u64>> {
    let (slides, blocks) = (part(parts, "slides").unwrap_or_default(), rotates.len());
    let absent = parts.get("default_window").and_then(Value::as_u64).unwrap_or(0);
    let has_windows = fields.flag("use_sliding_window", true)?;
    let field = part(parts, "window_field").unwrap_or_default();
    let window = if has_windows { fields.number_or_null(field, absent)? } else { 0 };
    let (mut first, mut pattern) = (0, 0);
    match slides {
        "none" => return Ok(vec![0; blocks]),
        "all" => return Ok(vec![window; blocks]),
        "last" => first = fields.number("max_window_layers", 0)?,
        "every_second" => pattern = 2,
        "all_but_each" => {
            let known = fields.optional("sliding_window_pattern")?.is_some();
            let field = if known { "sliding_window_pattern" } else { "_sliding_window_pattern" };
            pattern = fields.number(field, 6)?;
            ensure(pattern != 0, || is_zero(field))?;
        }
        _ => {}
    }
    let has_window = |(at, rotates): (u64, &bool)| {
        at >= first && !(at + 1).is_multiple_of(pattern) && (slides != "rotated" || *rotates)
    };
    let Some(types) = fields.list("layer_types")? else {
        return Ok((0..).zip(rotates).map(|layer| if has_window(layer) { window } else { 0 }).collect());
    };
    check_length("layer_types", types.len(), blocks)?;
    let known = |kind: &Value| match kind.as_str() {
        Some("sliding_attention" | "chunked_attention") => Ok(window),
        Some("full_attention") => Ok(0),
        _ => Err(wrong(format!("`layer_types` has {kind}, which is not supported"))),
    };
    types[..blocks].iter().map(known).collect()
}

fn check_length(list: &str, length: usize, blocks: usize) -> Result<()> {
    let wrong = || wrong(format!("`{list}` has fewer elements than the model has layers: {length} and {blocks}"));
    ensure(length >= blocks, wrong)
}
