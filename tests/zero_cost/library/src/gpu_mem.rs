/// Keeps this code with the feature `gpumem`. Without the feature, there is no code.
#[cfg(feature = "gpumem")]
macro_rules! gpu_mem {
    ($($code:tt)*) => { $($code)* };
}
#[cfg(not(feature = "gpumem"))]
macro_rules! gpu_mem {
    ($($code:tt)*) => {};
}
