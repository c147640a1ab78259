//! Tests `impl` blocks.

use super::*;

struct Matrix<const N: usize>;

#[gpu_mem_trace]
impl<const N: usize> Matrix<{ N }> {
    #![allow(clippy::unused_self, non_upper_case_globals)]
    const Size: usize = N;

    pub(super) const fn size() -> usize {
        Self::Size
    }

    fn new() -> Self {
        Self
    }

    fn rows(&self) -> usize {
        Self::size()
    }

    #[gpu_mem_trace(ctx = "its own")]
    fn own(&self) {}

    #[gpumem::gpu_mem_trace(ctx = "by path")]
    fn own_by_path(&self) {}

    #[cfg_attr(all(), gpu_mem_trace(ctx = "conditional"))]
    fn own_conditional(&self) {}

    #[gpu_mem_trace(skip)]
    fn skipped(&self) {}

    async fn asynchronous(&self) -> usize {
        Yield::default().await;
        N
    }
}

#[gpu_mem_trace(silent)]
impl Matrix<9> {
    fn quiet() {}

    #[gpu_mem_trace]
    fn loud() {}
}

#[gpu_mem_trace]
impl<const N: usize> Iterator for Matrix<N> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        None
    }
}

#[test]
fn trace_every_method_once() {
    let mut matrix = Matrix::<3>;
    check(Matrix::<3>::new, ["Matrix::new"]);
    check(|| assert_eq!(matrix.rows(), 3), ["Matrix::rows"]);
    check(|| matrix.own(), ["its own"]);
    check(|| matrix.own_by_path(), ["by path"]);
    check(|| matrix.own_conditional(), ["conditional"]);
    check(|| matrix.skipped(), []);
    let future = matrix.asynchronous();
    check(|| block_on(future), ["Matrix::asynchronous"]);
    check(|| matrix.next(), ["Matrix::next"]);
    check(Matrix::quiet, []);
    check(Matrix::loud, ["Matrix::loud"]);
}
