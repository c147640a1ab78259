//! Types of elements, down to blocks of 4-bit numbers that share a scale.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are those of the types")]
pub enum Dtype {
    F64,
    #[default]
    F32,
    F16,
    Bf16,
    /// 8-bit floats: `e4m3` and `e5m2`.
    F8,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// Complex numbers of two `f32`.
    C64,
    /// Blocks of elements that are stored together with their scale.
    Blocks(Blocks),
}

/// A format that stores a fixed number of elements in a fixed number of bytes, including scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// Its name, such as `nf4`.
    pub name: &'static str,
    /// The number of elements of a block.
    pub elements: u32,
    /// The number of bytes of a block.
    pub bytes: u32,
}

/// The types in which the parameters of a model are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    /// The weights of linear layers.
    pub(crate) weights: Dtype,
    /// Embedding tables, the weights of experts, and the head of a model.
    pub(crate) tables: Dtype,
    /// All other parameters, and the type of computation.
    pub(crate) others: Dtype,
}

impl Types {
    /// Returns the types of a model whose parameters have this type. `compute` is the type of everything else, if this
    /// type is only for storage.
    pub(crate) fn new(parameters: Dtype, compute: Dtype) -> Self {
        let others = if parameters.is_only_stored() { compute } else { parameters };
        // `load_in_8bit` of bitsandbytes replaces only linear layers. The formats of llama.cpp are for all weights.
        let tables = if parameters == Dtype::I8 { others } else { parameters };
        Self { weights: parameters, tables, others }
    }
}

/// The formats with blocks: the name, and the elements and the bytes of a block.
///
/// - bitsandbytes: 64 elements of 4 bits and a scale of 32 bits. `fp4` is its other table of values. With nested quantisation, scales
///   have 8 bits, and there is one 32-bit scale for every 256 of them.
/// - The Open Compute Project: 32 elements and an 8-bit exponent.
/// - 4-bit and 6-bit numbers without scales, as safetensors stores them.
/// - GGUF. No file contains `q8_1`: ggml creates it for products, and Python's package has an older size.
const BLOCKS: &str = "nf4 64 36, fp4 64 36, nf4_nested 16384 8452, mxfp8 32 33, mxfp6 32 25, mxfp4 32 17, nvfp4 16 9, f4 2 1, f6 4 3, \
                      q1_0 128 18, q4_0 32 18, q4_1 32 20, q5_0 32 22, q5_1 32 24, q8_0 32 34, q8_1 32 36, q2_k 256 84, q3_k 256 110, \
                      q4_k 256 144, q5_k 256 176, q6_k 256 210, q8_k 256 292, iq1_s 256 50, iq1_m 256 56, iq2_xxs 256 66, \
                      iq2_xs 256 74, iq2_s 256 82, iq3_xxs 256 98, iq3_s 256 110, iq4_nl 32 18, iq4_xs 256 136, tq1_0 256 54, \
                      tq2_0 256 66";

fn blocks() -> impl Iterator<Item = Blocks> {
    BLOCKS.split(", ").filter_map(|format| {
        let mut words = format.split(' ');
        let (name, mut number) = (words.next()?, || words.next()?.parse().ok());
        Some(Blocks { name, elements: number()?, bytes: number()? })
    })
}

/// The name of each other type, and other names that PyTorch and people use for it.
pub(crate) const PLAIN: &[(&str, Dtype, &[&str])] = &[
    ("f64", Dtype::F64, &["float64", "double", "fp64"]),
    ("f32", Dtype::F32, &["float32", "float", "fp32"]),
    ("f16", Dtype::F16, &["float16", "half", "fp16"]),
    ("bf16", Dtype::Bf16, &["bfloat16"]),
    ("f8", Dtype::F8, &["float8", "fp8", "float8_e4m3fn", "float8_e5m2"]),
    ("i64", Dtype::I64, &["int64"]),
    ("i32", Dtype::I32, &["int32"]),
    ("i16", Dtype::I16, &["int16"]),
    ("i8", Dtype::I8, &["int8"]),
    ("u64", Dtype::U64, &["uint64"]),
    ("u32", Dtype::U32, &["uint32"]),
    ("u16", Dtype::U16, &["uint16"]),
    ("u8", Dtype::U8, &["uint8"]),
    ("bool", Dtype::Bool, &[]),
    ("c64", Dtype::C64, &["complex64"]),
];

impl Dtype {
    /// Returns the number of elements that are stored together.
    pub(crate) fn block(self) -> u64 {
        if let Self::Blocks(blocks) = self { blocks.elements.into() } else { 1 }
    }

    /// Returns the bytes that this many elements take. `None` if that exceeds 64 bits.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let size = match self {
            Self::F64 | Self::I64 | Self::U64 | Self::C64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F8 | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::Blocks(blocks) => {
                return elements.div_ceil(blocks.elements.into()).checked_mul(blocks.bytes.into());
            }
        };
        elements.checked_mul(size)
    }

    /// Returns whether the type is only for storage: products read such weights and return a wider type.
    pub const fn is_only_stored(self) -> bool {
        matches!(self, Self::F8 | Self::I8 | Self::Blocks(_))
    }

    /// Returns the names of all types, as `Display` prints them.
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        PLAIN.iter().map(|(name, ..)| *name).chain(blocks().map(|blocks| blocks.name))
    }

    /// Returns whether the elements are floating-point numbers, which can have gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16 | Self::F8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = PLAIN.iter().find(|(_, dtype, _)| dtype == self).map(|(name, ..)| *name);
        let Self::Blocks(blocks) = self else { return f.pad(plain.unwrap_or_default()) };
        f.pad(blocks.name)
    }
}

/// Parses the names that `Display` prints, and PyTorch's, such as `torch.bfloat16` and `half`, ignoring case.
impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.to_ascii_lowercase();
        let name = name.strip_prefix("torch.").unwrap_or(&name);
        let is_plain = |(known, _, others): &&(&str, Self, &[&str])| *known == name || others.contains(&name);
        let plain = PLAIN.iter().find(is_plain).map(|(_, dtype, _)| *dtype);
        let blocks = || blocks().find(|blocks| blocks.name == name).map(Self::Blocks);
        plain.or_else(blocks).ok_or_else(|| {
            let known = Self::names().collect::<Vec<_>>().join(", ");
            let what =
                format!("`{text}` is not a type of elements; there are {known}, and PyTorch's names, such as bfloat16");
            Error::invalid(what)
        })
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::{Dtype, PLAIN, blocks};

    #[test]
    fn names_are_read_back() {
        let all = PLAIN.iter().map(|(_, dtype, _)| *dtype).chain(blocks().map(Dtype::Blocks));
        for dtype in all {
            assert_eq!(dtype.to_string().parse::<Dtype>().unwrap(), dtype);
        }
        let unknown = "f33".parse::<Dtype>().unwrap_err().to_string();
        assert!(
            unknown.starts_with("`f33` is not a type of elements; there are f64, f32, f16, bf16, f8, "),
            "{unknown}"
        );
        assert!(Dtype::names().all(|name| unknown.contains(name)), "{unknown}");
        assert!(unknown.ends_with(", tq2_0, and PyTorch's names, such as bfloat16"), "{unknown}");
    }

    #[test]
    fn blocks_are_whole() {
        let bytes = |name: &str, elements| name.parse::<Dtype>().unwrap().bytes(elements);
        assert_eq!(bytes("nf4", 4096 * 4096), Some(4096 * 4096 / 2 + 4096 * 4096 / 64 * 4));
        assert_eq!(bytes("nf4_nested", 4096 * 4096), Some(4096 * 4096 / 2 + 4096 * 64 + 4096 / 4 * 4));
        assert_eq!(bytes("f6", 8), Some(6));
        assert_eq!(bytes("q4_0", 33), Some(36), "a part of a block takes a block");
        assert_eq!(bytes("q6_k", 0), Some(0));
        assert_eq!(bytes("bool", 7), Some(7));
        assert_eq!(bytes("f64", u64::MAX / 8), Some(u64::MAX / 8 * 8));
        assert_eq!(bytes("f64", u64::MAX / 8 + 1), None);
        assert_eq!(bytes("q8_0", u64::MAX), None);
    }
}
