use std::hint::black_box;

/// Runs code below this number of nested calls, which the compiler does not remove.
#[inline(never)]
pub fn with_nested_calls(depth: usize, at_the_bottom: &mut dyn FnMut()) {
    match depth {
        0 => at_the_bottom(),
        _ => with_nested_calls(depth - 1, at_the_bottom),
    }
    black_box(());
}
