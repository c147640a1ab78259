//! What kernels do with their memory, by their names.
//!
//! The driver tells the sizes of a kernel's parameters, and not whether the kernel reads or writes through an address. The name of a C++
//! kernel has the types of its parameters: nothing is written through `T const*`. PyTorch's iterators pass all addresses in one struct, whose
//! order is known. An address about which nothing is known is read and written.

use std::{collections::HashMap, sync::Arc};

/// The use of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) is_read: bool,
    pub(super) is_written: bool,
}

impl Role {
    /// Returns whether the kernel uses memory at the address.
    pub(super) fn is_used(self) -> bool {
        self.is_read || self.is_written
    }
}

const READ: Role = Role { is_read: true, is_written: false };
const WRITTEN: Role = Role { is_read: false, is_written: true };
const BOTH: Role = Role { is_read: true, is_written: true };
/// The kernel computes with the address and does not access memory there.
const VALUE: Role = Role { is_read: false, is_written: false };

/// The order of a kernel's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The first address is written, and the others are read.
    Output,
    /// The first address is read, and the others are written.
    Input,
    /// All addresses are written.
    Outputs,
    /// The last address is written, and the others are values: PyTorch computes the tables of addresses for cuSOLVER with `arange`.
    Sequence,
    /// The second address is read and written, and the others are read.
    Scatter,
}

/// The kernel that copies values to or from given indices of a tensor.
const SCATTER: &str = "_scatter_gather_elementwise_kernel";

/// Kernels of PyTorch by a part of their name. The first row that matches counts.
const ORDERS: &[(&str, Option<Order>)] = &[
    ("distribution_elementwise_grid_stride_kernel", Some(Order::Outputs)),
    ("elementwise_kernel_with_index", Some(Order::Sequence)),
    ("CatArrayBatchedCopy", Some(Order::Output)),
    ("vectorized_gather_kernel", Some(Order::Output)),
    ("native13reduce_kernel", Some(Order::Input)),
    (SCATTER, Some(Order::Scatter)),
    ("for_multi_outputs", None),
    ("elementwise_kernel", Some(Order::Output)),
];

/// Kernels that use values from memory as indices, or that check them: with a wrong value, they end the program.
const WITH_INDICES: &[&str] =
    &["index", "Index", "gather", "scatter", "mbedding", "nll_loss", "assert", "one_hot", "histogram", "multinomial"];

/// Kernels that only compute with values: no value can end the program. All others are skipped if they would read a value that is not known.
/// Those of lists of tensors are not in it: gradient scaling would find infinite gradients, and the optimizer would not make its step.
const WITHOUT_INDICES: &[&str] = &[
    "elementwise_kernel",
    "reduce_kernel",
    "CatArrayBatchedCopy",
    "oftmax",
    "oftMax",
    "layer_norm",
    "LayerNorm",
    "RowwiseMoments",
    "batch_norm",
    "GroupNorm",
    "cub",
    "gemm",
    "gemv",
    "cutlass",
    "cudnn",
    "pool",
    "upsample",
    // cuSOLVER turns its initial value for "no error" into 0.
    "reset_info",
];

/// The addresses whose values may end the program if they are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Indices {
    None,
    /// Only the first address.
    First,
    All,
}

/// What a kernel does with its memory.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    order: Option<Order>,
    /// True for each parameter through which nothing is written.
    reads_only: Vec<bool>,
    indices: Indices,
    /// True if it waits for kernels of other ranks, which may be skipped.
    pub(super) is_collective: bool,
}

impl Kernel {
    /// Returns what is known by this name, as the compiler has written it.
    pub(super) fn named(name: &str) -> Self {
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let indices = match name {
            // The compiler passes addresses in the order in which the kernel's lambda uses them: index, destination, source.
            _ if name.contains(SCATTER) => Indices::First,
            _ if has(WITHOUT_INDICES) && !has(WITH_INDICES) => Indices::None,
            _ => Indices::All,
        };
        Self {
            order: ORDERS.iter().find(|(part, _)| name.contains(part)).and_then(|(_, order)| *order),
            reads_only: parameters(name).iter().map(|parameter| is_read_only(parameter)).collect(),
            indices,
            is_collective: name.starts_with("nccl"),
        }
    }

    /// Returns whether a wrong value at an address that it reads may end the program. `at` counts the addresses of the kernel.
    pub(super) fn needs(&self, at: usize) -> bool {
        match self.indices {
            Indices::None => false,
            Indices::First => at == 0,
            Indices::All => true,
        }
    }

    /// Returns the role of an address: `at` counts the addresses of the kernel, and `parameter` is the parameter that contains it, of
    /// `parameters`. That number is not known if they were passed in a buffer.
    pub(super) fn role(&self, at: usize, parameter: usize, parameters: Option<usize>) -> Role {
        let has_types = Some(self.reads_only.len()) == parameters;
        match self.order {
            _ if has_types && self.reads_only[parameter] => READ,
            Some(Order::Output) if at > 0 => READ,
            Some(Order::Input) if at == 0 => READ,
            Some(Order::Scatter) if at != 1 => READ,
            Some(Order::Sequence) if parameters.is_some_and(|count| parameter + 1 < count) => VALUE,
            Some(Order::Scatter) | None => BOTH,
            Some(_) => WRITTEN,
        }
    }
}

/// Returns the types of a function's parameters. Empty if the name does not have them.
fn parameters(name: &str) -> Vec<String> {
    let demangled = cpp_demangle::Symbol::new(name).ok().and_then(|symbol| symbol.demangle().ok());
    let Some(text) = demangled.as_deref().and_then(|text| text.strip_suffix(')')) else { return Vec::new() };
    let (mut depth, mut end, mut found) = (0_usize, text.len(), Vec::new());
    for (at, letter) in text.char_indices().rev() {
        match letter {
            ')' | '>' | ']' | '}' => depth += 1,
            '(' if depth == 0 => {
                found.push(text[at + 1..end].trim().to_owned());
                found.reverse();
                return found;
            }
            '(' | '<' | '[' | '{' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                found.push(text[at + 1..end].trim().to_owned());
                end = at;
            }
            _ => {}
        }
    }
    Vec::new()
}

/// Returns whether nothing is written through a parameter of this type.
fn is_read_only(parameter: &str) -> bool {
    let is_tensor = ["TensorInfo<", "PackedTensorAccessor"].iter().any(|part| parameter.contains(part));
    parameter.ends_with("const*") || is_tensor && parameter.contains(" const,")
}

/// The kernels that were launched, with their names, by the handle of their function.
#[derive(Debug, Default)]
pub(super) struct Kernels(HashMap<u64, (Box<str>, Arc<Kernel>)>);

impl Kernels {
    /// Returns the kernel of a function with this name, and whether it is new. The driver may give the handle of an unloaded function to another
    /// one.
    pub(super) fn get(&mut self, function: u64, name: &str) -> (Arc<Kernel>, bool) {
        /// A program that loads modules forever does not fill the memory.
        const MOST: usize = 1 << 16;
        if let Some((known, kernel)) = self.0.get(&function)
            && **known == *name
        {
            return (Arc::clone(kernel), false);
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        let kernel = Arc::new(Kernel::named(name));
        self.0.insert(function, (name.into(), Arc::clone(&kernel)));
        (kernel, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(name: &str, parameters: &[usize]) -> Vec<Role> {
        let kernel = Kernel::named(name);
        let count = parameters.iter().max().map_or(0, |last| last + 1);
        parameters.iter().enumerate().map(|(at, parameter)| kernel.role(at, *parameter, Some(count))).collect()
    }

    #[test]
    fn the_types_of_parameters_are_in_the_name() {
        assert_eq!(parameters("_Z3addPKfPfi"), ["float const*", "float*", "int"]);
        assert_eq!(roles("_Z3addPKfPf", &[0, 1]), [READ, BOTH]);
        // The number of parameters is another one, or there are no types.
        assert_eq!(roles("_Z3addPKfPfi", &[0, 1]), [BOTH, BOTH]);
        assert_eq!(roles("triton_poi_fused_add_0", &[0, 1]), [BOTH, BOTH]);
        assert_eq!(Kernel::named("").role(0, 0, None), BOTH);
        assert!(parameters("_Z").is_empty() && parameters("").is_empty() && parameters("x)").is_empty());
    }

    #[test]
    fn pytorch_passes_the_output_first() {
        let fill = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_";
        assert_eq!(roles(fill, &[2]), [WRITTEN]);
        let add =
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_";
        assert_eq!(roles(add, &[2, 2, 2]), [WRITTEN, READ, READ]);
        assert!(!Kernel::named(add).needs(0));
        let both = "_ZN2at6native46unrolled_elementwise_kernel_for_multi_outputsILi2EvEEvT1_";
        assert_eq!(roles(both, &[0, 0]), [BOTH, BOTH]);
        let index = "_ZN2at6native24index_elementwise_kernelILi128ELi4EZNS0_16gpu_index_kernelIvEEvEUliE_EEvlT1_";
        assert!(Kernel::named(index).needs(1));
        let range = "_ZN50_GLOBAL__N__fa15d16e_17_RangeFactories_cu_38772b0829elementwise_kernel_with_indexIiZZZN2at6native15arange_cuda_outEEEvT_T0_Pl";
        assert_eq!(roles(range, &[1, 2]), [VALUE, WRITTEN]);
        let unscale =
            "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi1EEEvJEEEvT_T0_DpT1_";
        assert!(Kernel::named(unscale).needs(0), "it finds infinite gradients");
        let scatter =
            "_ZN2at6native34_scatter_gather_elementwise_kernelILi128ELi8EZNS0_36_cuda_scatter_gather_internal_kernelE";
        assert_eq!(roles(scatter, &[0, 0, 0]), [READ, BOTH, READ]);
        assert_eq!([0, 1, 2].map(|at| Kernel::named(scatter).needs(at)), [true, false, false]);
        assert_eq!(roles("_ZN2at6native13reduce_kernelILi512ELi1EvEEvT1_", &[0, 0, 0]), [READ, WRITTEN, WRITTEN]);
    }

    #[test]
    fn a_handle_may_belong_to_another_kernel_later() {
        let mut kernels = Kernels::default();
        let mut get = |name| {
            let (kernel, is_new) = kernels.get(1, name);
            (kernel.is_collective, is_new)
        };
        assert_eq!(
            [get("add"), get("add"), get("ncclSend"), get("add")],
            [(false, true), (false, false), (true, true), (false, true)]
        );
    }

    #[test]
    fn a_kernel_with_an_unknown_name_may_use_values_as_indices() {
        assert!(["", "_Z4walkPKiPf"].iter().all(|name| Kernel::named(name).needs(1)));
        assert!(!Kernel::named("_Z16potrf_reset_infoILi256EEviPi").needs(0));
        assert!(Kernel::named("ncclDevKernel_AllReduce_Sum_f32_RING_LL").is_collective);
    }
}
