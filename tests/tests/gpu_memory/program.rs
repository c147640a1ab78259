//! A program that multiplies matrices and keeps its own log of what it allocates.

use super::*;

pub(super) type Path = Vec<&'static str>;

/// The program's own log of its allocations.
#[derive(Default)]
pub(super) struct Log {
    /// The scopes that are open.
    pub(super) path: Path,
    pub(super) entries: Vec<Entry>,
}

pub(super) enum Entry {
    Opened(Path),
    /// A block that was allocated in this path was given out or returned.
    Changed(Path, i64),
}

/// The figures of a path.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Figures {
    pub(super) calls: u64,
    pub(super) used: u64,
    pub(super) peak: u64,
    pub(super) total: u64,
    pub(super) allocations: u64,
}

impl Log {
    /// Replays the log for one path and all paths inside it. An empty path stands for all.
    pub(super) fn replay(&self, path: &[&str]) -> Figures {
        let mut figures = Figures::default();
        for entry in &self.entries {
            match entry {
                Entry::Opened(opened) => figures.calls += u64::from(opened == path),
                Entry::Changed(of, by) if of.starts_with(path) => {
                    figures.used = figures.used.checked_add_signed(*by).expect("no more is freed than was allocated");
                    figures.peak = figures.peak.max(figures.used);
                    figures.total += u64::try_from(*by).unwrap_or(0);
                    figures.allocations += u64::from(*by > 0);
                }
                Entry::Changed(..) => {}
            }
        }
        figures
    }

    /// Returns the most that was allocated at one time from this entry on.
    pub(super) fn peak_since(&self, first: usize) -> u64 {
        let change = |entry: &Entry| if let Entry::Changed(_, by) = entry { *by } else { 0 };
        let (before, since) = self.entries.split_at(first);
        let mut used: i64 = before.iter().map(change).sum();
        let mut peak = used;
        for entry in since {
            used += change(entry);
            peak = peak.max(used);
        }
        peak.unsigned_abs()
    }

    pub(super) fn paths(&self) -> BTreeSet<Path> {
        let opened = |entry: &Entry| if let Entry::Opened(path) = entry { Some(path.clone()) } else { None };
        self.entries.iter().filter_map(opened).collect()
    }
}

/// Floats on the device in the order of cuBLAS: column after column.
pub(super) struct Matrix {
    pub(super) at: u64,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) made_in: Path,
    /// Frees stream-ordered memory when it is dropped. `None` for memory of `cuMemAlloc`.
    pub(super) pooled: Option<CudaSlice<f32>>,
}

impl Matrix {
    pub(super) fn len(&self) -> usize {
        self.rows * self.columns
    }

    pub(super) fn bytes(&self) -> i64 {
        i64::try_from(self.len() * 4).expect("small")
    }
}

/// A program that keeps its own log beside gpumem's.
pub(super) struct Program {
    pub(super) stream: Arc<CudaStream>,
    pub(super) log: Log,
}

impl Program {
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self { stream: context.default_stream(), log: Log::default() }
    }

    pub(super) fn scope<R>(&mut self, name: &'static str, code: impl FnOnce(&mut Self) -> R) -> R {
        self.log.path.push(name);
        self.log.entries.push(Entry::Opened(self.log.path.clone()));
        let result = GpuMemTrace::scope(name, |trace| {
            trace.set_silent(true);
            code(self)
        });
        self.log.path.pop();
        result
    }

    /// Allocates a matrix in stream order, with cudarc.
    pub(super) fn pooled(&mut self, rows: usize, columns: usize) -> Matrix {
        let slice = self.stream.alloc_zeros::<f32>(rows * columns).expect("the device has room");
        let at = slice.device_ptr(&self.stream).0;
        self.made(at, rows, columns, Some(slice))
    }

    /// Allocates a matrix with `cuMemAlloc`.
    pub(super) fn plain(&mut self, rows: usize, columns: usize) -> Matrix {
        // SAFETY: a context is current. Nothing reads the memory before it was written.
        let at = unsafe { result::malloc_sync(rows * columns * 4) }.expect("the device has room");
        self.made(at, rows, columns, None)
    }

    pub(super) fn made(&mut self, at: u64, rows: usize, columns: usize, pooled: Option<CudaSlice<f32>>) -> Matrix {
        let matrix = Matrix { at, rows, columns, made_in: self.log.path.clone(), pooled };
        self.log.entries.push(Entry::Changed(matrix.made_in.clone(), matrix.bytes()));
        matrix
    }

    pub(super) fn free(&mut self, matrix: Matrix) {
        self.log.entries.push(Entry::Changed(matrix.made_in.clone(), -matrix.bytes()));
        match matrix.pooled {
            Some(slice) => drop(slice),
            // SAFETY: the block came from `malloc_sync` and is given back once, after what the stream does with it:
            // `cuMemFree` waits.
            None => unsafe { result::free_sync(matrix.at) }.expect("it was allocated"),
        }
    }
}

pub(super) fn fill(matrix: &Matrix, value: f32) {
    // SAFETY: the matrix is live and has as many elements of 32 bits.
    unsafe { sys::cuMemsetD32_v2(matrix.at, value.to_bits(), matrix.len()) }.result().expect("the device writes");
}

pub(super) fn first(matrix: &Matrix) -> f32 {
    let mut value = [0.0];
    // SAFETY: the matrix is live and not empty.
    unsafe { result::memcpy_dtoh_sync(&mut value, matrix.at) }.expect("nothing failed before it");
    value[0]
}

/// `c = a · b`, where each may be transposed.
pub(super) fn multiply(by: &CudaBlas, (a, a_turned): (&Matrix, bool), (b, b_turned): (&Matrix, bool), c: &Matrix) {
    let int = |of: usize| i32::try_from(of).expect("small");
    let turned = |turned| {
        if turned { blas_sys::cublasOperation_t::CUBLAS_OP_T } else { blas_sys::cublasOperation_t::CUBLAS_OP_N }
    };
    let float = |of: &Matrix| ptr::with_exposed_provenance_mut::<f32>(usize::try_from(of.at).expect("64 bits"));
    let inner = if a_turned { a.rows } else { a.columns };
    let (one, zero) = (1.0, 0.0);
    // SAFETY: all are live on the device of the handle, their sizes are passed on, and the scalars are on the host.
    let done = unsafe {
        blas::sgemm(
            *by.handle(),
            turned(a_turned),
            turned(b_turned),
            int(c.rows),
            int(c.columns),
            int(inner),
            &raw const one,
            float(a),
            int(a.rows),
            float(b),
            int(b.rows),
            &raw const zero,
            float(c),
            int(c.rows),
        )
    };
    done.expect("cuBLAS multiplies");
}

/// `weights -= rate * gradient`.
pub(super) struct Descent(pub(super) sys::CUfunction);

impl Descent {
    pub(super) fn load() -> Self {
        const PTX: &std::ffi::CStr = c"\
.version 8.0
.target sm_80
.address_size 64
.visible .entry descend(.param .u64 p_weights, .param .u64 p_gradient, .param .f32 p_rate, .param .u32 p_count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p_weights];
    ld.param.u64 %rd2, [p_gradient];
    ld.param.f32 %f1, [p_rate];
    ld.param.u32 %r1, [p_count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd7];
    neg.f32 %f4, %f1;
    fma.rn.f32 %f5, %f4, %f3, %f2;
    st.global.f32 [%rd6], %f5;
DONE:
    ret;
}
";
        // SAFETY: the image and the name are C strings, and the module is never unloaded.
        let kernel = unsafe {
            let module = result::module::load_data(PTX.as_ptr().cast()).expect("the driver compiles it");
            result::module::get_function(module, c"descend".to_owned())
        };
        Self(kernel.expect("it is in the module"))
    }

    pub(super) fn step(&self, weights: &Matrix, gradient: &Matrix, rate: f32) {
        const BLOCK: u32 = 256;
        let count = u32::try_from(weights.len()).expect("small");
        let mut arguments: [*mut c_void; 4] = [
            (&raw const weights.at).cast_mut().cast(),
            (&raw const gradient.at).cast_mut().cast(),
            (&raw const rate).cast_mut().cast(),
            (&raw const count).cast_mut().cast(),
        ];
        let (grid, block) = ((count.div_ceil(BLOCK), 1, 1), (BLOCK, 1, 1));
        // SAFETY: the arguments are as the kernel has them, both matrices are live and have so many elements, and the null
        // stream always is.
        unsafe { result::launch_kernel(self.0, grid, block, 0, ptr::null_mut(), &mut arguments) }
            .expect("the kernel can be launched");
    }
}
