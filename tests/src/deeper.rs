use std::hint::black_box;

/// Does something under so many calls, which the compiler keeps.
#[inline(never)]
pub fn deeper(depth: usize, at_the_bottom: &mut dyn FnMut()) {
    match depth {
        0 => at_the_bottom(),
        _ => deeper(depth - 1, at_the_bottom),
    }
    black_box(());
}
