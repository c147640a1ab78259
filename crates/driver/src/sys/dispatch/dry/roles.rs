//! What kernels do with their memory, by their names.
//!
//! The driver tells the sizes of a kernel's parameters, and not whether the kernel reads or writes through an address. The name of a C++
//! kernel has the types of its parameters: nothing is written through `T const*`. PyTorch's iterators pass all addresses in one struct, whose
//! order is known. An address about which nothing is known is read, and may be written.

use std::{collections::HashMap, sync::Arc};

use super::contents::Content;

/// The use of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) is_read: bool,
    /// `None` if the kernel does not write there.
    pub(super) output: Option<Output>,
}

/// What a kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// It may write some of the values, or none.
    Possible,
    Certain,
    Addresses,
}

impl Role {
    /// Returns whether the kernel uses memory at the address.
    pub(super) fn is_used(self) -> bool {
        self.is_read || self.output.is_some()
    }
}

const READ: Role = Role { is_read: true, output: None };
/// Nothing is known about the use.
const ANY: Role = Role { is_read: true, output: Some(Output::Possible) };
/// The kernel computes with the address and does not access memory there.
const VALUE: Role = Role { is_read: false, output: None };

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
const WITH_INDICES: &[&str] = &[
    "index",
    "Index",
    "gather",
    "scatter",
    "mbedding",
    "nll_loss",
    "assert",
    "one_hot",
    "histogram",
    "multinomial",
    "unpack_pivots",
    "unpool",
    "fractional_max_pool",
];

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
];

/// Reductions of PyTorch, and what they are without values, as in Python: `any([])` is false, and `all([])` is true. Thus a solver does not
/// report an error, and a program that waits for all values does not wait forever.
const REDUCTIONS: &[(&str, u8)] = &[("14or_kernel_cuda", 0), ("15and_kernel_cuda", 1)];

/// The kernel of PyTorch that copies a tensor and may convert it.
const COPY: &str = "direct_copy_kernel_cuda";

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
    /// The use of an address in each parameter, by its type. Empty if the name does not have them.
    by_type: Vec<Role>,
    indices: Indices,
    /// True if it is known that all of an output is written.
    fills_outputs: bool,
    is_copy: bool,
    /// The result of a reduction without values. `None` for all other kernels.
    pub(super) result_of_nothing: Option<u8>,
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
            by_type: parameters(name).iter().map(|parameter| role_of_type(parameter)).collect(),
            indices,
            fills_outputs: !has(WITH_INDICES),
            is_copy: has(&[COPY]),
            result_of_nothing: REDUCTIONS.iter().find(|(part, _)| name.contains(part)).map(|(_, result)| *result),
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
        let by_type = if Some(self.by_type.len()) == parameters { self.by_type[parameter] } else { ANY };
        let role = match self.order {
            _ if by_type == READ => READ,
            Some(Order::Output) if at > 0 => READ,
            Some(Order::Input) if at == 0 => READ,
            Some(Order::Scatter) if at != 1 => READ,
            Some(Order::Sequence) if parameters.is_some_and(|count| parameter + 1 < count) => VALUE,
            Some(Order::Scatter) => ANY,
            None => by_type,
            Some(_) => Role { is_read: false, output: Some(Output::Certain) },
        };
        match role.output {
            Some(Output::Certain) if !self.fills_outputs => Role { output: Some(Output::Possible), ..role },
            _ => role,
        }
    }

    /// Returns the content of the outputs if the kernel is executed and some of its inputs are not known.
    pub(super) fn result_of(&self, mut unknown: impl Iterator<Item = Content>) -> Content {
        match (self.result_of_nothing, self.is_copy) {
            (Some(result), _) if unknown.all(|content| matches!(content, Content::Missing(_))) => {
                Content::Missing(result)
            }
            // A converted 0 is 0. Other bytes may change.
            (None, true) if unknown.all(|content| content == Content::Missing(0)) => Content::Missing(0),
            _ => Content::Unknown,
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

/// Returns the use of an address in a parameter of this type.
fn role_of_type(parameter: &str) -> Role {
    let is_tensor = ["TensorInfo<", "PackedTensorAccessor"].iter().any(|part| parameter.contains(part));
    let output = match parameter {
        _ if parameter.ends_with("const*") || is_tensor && parameter.contains(" const,") => return READ,
        _ if parameter.ends_with("**") => Output::Addresses,
        // Of a buffer whose type is not known, only a part may be used.
        _ if parameter.ends_with('*') && parameter != "void*" => Output::Certain,
        _ => Output::Possible,
    };
    Role { is_read: true, output: Some(output) }
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

    const WRITTEN: Role = Role { is_read: false, output: Some(Output::Certain) };
    const CHANGED: Role = Role { is_read: true, output: Some(Output::Certain) };
    const TABLE: Role = Role { is_read: true, output: Some(Output::Addresses) };

    #[test]
    fn the_types_of_parameters_are_in_the_name() {
        assert_eq!(parameters("_Z3addPKfPfi"), ["float const*", "float*", "int"]);
        assert_eq!(roles("_Z3addPKfPf", &[0, 1]), [READ, CHANGED]);
        assert_eq!(
            roles("_Z24magma_iset_pointer_kernelPPiS_PvS1_", &[0, 1, 2]),
            [ANY; 3],
            "the name has a wrong length"
        );
        assert_eq!(roles("_Z11set_pointerPPiS_PvPKS_", &[0, 1, 2, 3]), [TABLE, CHANGED, ANY, READ]);
        assert_eq!(roles("_Z9index_addPKfPf", &[0, 1]), [READ, ANY], "it may change a part of the output");
        // The number of parameters is another one, or there are no types.
        assert_eq!(roles("_Z3addPKfPfi", &[0, 1]), [ANY, ANY]);
        assert_eq!(roles("triton_poi_fused_add_0", &[0, 1]), [ANY, ANY]);
        assert_eq!(Kernel::named("").role(0, 0, None), ANY);
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
        assert_eq!(roles(both, &[0, 0]), [ANY, ANY]);
        let index = "_ZN2at6native24index_elementwise_kernelILi128ELi4EZNS0_16gpu_index_kernelIvEEvEUliE_EEvlT1_";
        let pivots = "_ZN2at6native12_GLOBAL__N_119_elementwise_kernelILi128ELi8EZNS1_25unpack_pivots_cuda_kernelERNS_14TensorIteratorEllEUliE_EEviT1_";
        assert!([index, pivots].iter().all(|name| Kernel::named(name).needs(1)));
        let range = "_ZN50_GLOBAL__N__fa15d16e_17_RangeFactories_cu_38772b0829elementwise_kernel_with_indexIiZZZN2at6native15arange_cuda_outEEEvT_T0_Pl";
        assert_eq!(roles(range, &[1, 2]), [VALUE, Role { is_read: false, ..ANY }]);
        let unscale =
            "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi1EEEvJEEEvT_T0_DpT1_";
        assert!(Kernel::named(unscale).needs(0), "it finds infinite gradients");
        let scatter =
            "_ZN2at6native34_scatter_gather_elementwise_kernelILi128ELi8EZNS0_36_cuda_scatter_gather_internal_kernelE";
        assert_eq!(roles(scatter, &[0, 0, 0]), [READ, ANY, READ]);
        assert_eq!([0, 1, 2].map(|at| Kernel::named(scatter).needs(at)), [true, false, false]);
        assert_eq!(roles("_ZN2at6native13reduce_kernelILi512ELi1EvEEvT1_", &[0, 0, 0]), [READ, WRITTEN, WRITTEN]);
    }

    #[test]
    fn missing_values_are_as_an_empty_list() {
        use Content::{Missing, Unknown};

        let reduction = |kind: &str| {
            Kernel::named(&format!(
                "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIiNS0_14func_wrapper_tIbZZZNS0_{kind}_kernel_cudaERNS_14TensorIteratorEEEvT1_"
            ))
        };
        let copy =
            Kernel::named("_ZN2at6native18elementwise_kernelILi128ELi2EZZZNS0_23direct_copy_kernel_cudaERNSEEviT1_");
        let kernels = [reduction("14or"), reduction("15and"), reduction("7sum_functor"), copy];
        assert_eq!(kernels.each_ref().map(|kernel| kernel.result_of_nothing), [Some(0), Some(1), None, None]);
        let results = |unknown: &[Content]| kernels.each_ref().map(|kernel| kernel.result_of(unknown.iter().copied()));
        assert_eq!(results(&[Missing(0)]), [Missing(0), Missing(1), Unknown, Missing(0)]);
        assert_eq!(results(&[Missing(1)]), [Missing(0), Missing(1), Unknown, Unknown]);
        assert_eq!(results(&[Missing(0), Unknown]), [Unknown; 4]);
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
        assert!(Kernel::named("ncclDevKernel_AllReduce_Sum_f32_RING_LL").is_collective);
    }
}
