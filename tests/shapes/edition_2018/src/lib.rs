//! Drop logs with and without the attribute, in a crate of edition 2018. `tests/tests/shapes.rs` calls it.

#[path = "../../common.rs"]
mod common;

/// Compares the drop logs, and what traces report, on this device: the only one.
pub fn the_attribute_changes_no_drop(gpu: &gpumem::sim::SimGpu) {
    common::compare(gpu, 2018);
    common::figures();
}
