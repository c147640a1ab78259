//! Labels for slices of cudarc's safe API, which contain their element type, length and address.

use std::{any::type_name, sync::Arc};

use ::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, ValidAsZeroBits};

use crate::{
    error::{Kind, Result},
    model::Shape,
    session::{self, Notice, current},
};

/// Labels for cudarc's slices: see [`label`](crate::tracker::label).
///
/// ```no_run
/// use cudarc::driver::CudaContext;
/// use gpumem::{cudarc::LabelExt, track, tracker::MemTracker};
///
/// let mut tracker = MemTracker::new();
/// let stream = CudaContext::new(0)?.default_stream(); // needs a GPU
/// let input = stream.clone_htod(&vec![1_u8; 3 * 224 * 224])?.labelled("input", &[3, 224, 224]);
/// let kernel = stream.alloc_zeros::<f32>(9)?;
/// kernel.label("kernel", &[3, 3])?;
/// track!(tracker); // lists both by their labels
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait LabelExt: Sized {
    /// Labels the slice. The slice already knows its element type and size.
    ///
    /// The slice's address comes from cudarc, in the same way as for a kernel that reads the slice on its own stream.
    ///
    /// # Errors
    /// Returns the same errors as [`label`](crate::tracker::label), and an error if the shape does not match the number
    /// of elements of the slice.
    fn label(&self, name: impl Into<String>, shape: &[usize]) -> Result<()>;

    /// Like [`label`](Self::label), for the line that allocates: `stream.alloc_zeros(9)?.labelled("kernel", &[3, 3])`. If
    /// allocations are not intercepted, the slice has no label. A wrong shape is reported once on stderr.
    #[must_use]
    fn labelled(self, name: impl Into<String>, shape: &[usize]) -> Self {
        if let Err(error) = self.label(name, shape)
            && error.is_invalid_setting()
        {
            current().notify(Notice::WrongShape, &error);
        }
        self
    }
}

impl<T> LabelExt for CudaSlice<T> {
    fn label(&self, name: impl Into<String>, shape: &[usize]) -> Result<()> {
        let elements = elements(shape);
        if elements != Some(self.len()) {
            let (name, shape, len) = (name.into(), Shape(shape), self.len());
            let elements = elements.map_or_else(|| "too many".to_owned(), |elements| elements.to_string());
            let setting = "a label's shape";
            let detail = format!("`{name}`: {shape} has {elements} elements, and the slice has {len}");
            return Err(Kind::BadSetting { setting, detail }.into());
        }
        let (address, _read) = self.device_ptr(self.stream());
        session::label(name, shape, dtype::<T>(), address)
    }
}

/// Labelled allocations from cudarc's streams.
///
/// ```no_run
/// use cudarc::driver::CudaContext;
/// use gpumem::cudarc::AllocLabelledExt;
///
/// let stream = CudaContext::new(0)?.default_stream(); // needs a GPU
/// let kernel = stream.alloc_labelled::<f32>("conv1.weight", &[512, 512, 3, 3])?;
/// assert_eq!(kernel.len(), 512 * 512 * 3 * 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AllocLabelledExt {
    /// Allocates a slice of this shape, filled with zeros, and labels it, as [`LabelExt::labelled`] does.
    ///
    /// # Errors
    /// Returns the errors of cudarc's `alloc_zeros`.
    fn alloc_labelled<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        name: impl Into<String>,
        shape: &[usize],
    ) -> Result<CudaSlice<T>, DriverError>;
}

impl AllocLabelledExt for Arc<CudaStream> {
    fn alloc_labelled<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        name: impl Into<String>,
        shape: &[usize],
    ) -> Result<CudaSlice<T>, DriverError> {
        // Too many elements for `usize`. The driver rejects the largest size with an error.
        let len = elements(shape).unwrap_or(usize::MAX / size_of::<T>().max(1));
        Ok(self.alloc_zeros(len)?.labelled(name, shape))
    }
}

fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size))
}

/// Returns the name of the type without its modules: `f32`, `bf16`, `Complex<f32>`.
fn dtype<T>() -> &'static str {
    let name = type_name::<T>();
    let path = &name[..name.find(['<', '[', '(']).unwrap_or(name.len())];
    path.rfind("::").map_or(name, |at| &name[at + 2..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_their_own_names() {
        mod half {
            pub(super) struct Bf16;
        }
        assert_eq!((dtype::<f32>(), dtype::<i16>(), dtype::<half::Bf16>()), ("f32", "i16", "Bf16"));
        assert_eq!((dtype::<[f32; 4]>(), dtype::<Option<u8>>()), ("[f32; 4]", "Option<u8>"));
    }

    #[test]
    fn shapes_have_so_many_elements() {
        assert_eq!(elements(&[512, 512, 3, 3]), Some(2_359_296));
        assert_eq!((elements(&[]), elements(&[5, 0]), elements(&[usize::MAX, 2])), (Some(1), Some(0), None));
    }
}
