//! The attribute changes no drop, in crates of three editions. One program calls them all, since each brings all of gpumem.

use gpumem::{Bytes, sim::SimGpu};

#[test]
fn the_attribute_changes_no_drop() {
    let gpu = SimGpu::install(Bytes::gib(1)).expect("no GPUMEM_SIM in the environment");
    gpumem_shapes_2018::the_attribute_changes_no_drop(&gpu);
    gpumem_shapes_2021::the_attribute_changes_no_drop(&gpu);
    gpumem_shapes_2024::the_attribute_changes_no_drop(&gpu);
}
