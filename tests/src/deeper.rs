use std::hint::black_box;

/// Runs code under this number of calls, which the compiler keeps.
#[inline(never)]
pub fn deeper(depth: usize, at_the_bottom: &mut dyn FnMut()) {
    match depth {
        0 => at_the_bottom(),
        _ => deeper(depth - 1, at_the_bottom),
    }
    black_box(());
}
