//! Names the kernels of `torch.compile`. The function that allocates for them has the same name in all programs. The code that PyTorch
//! generated shows which kernel writes to an allocation, and readers of the recording do not have that file.

use std::{fs::File, io::Read};

use crate::model::Frame;

/// The largest number of bytes that are read of a file.
const MOST_BYTES: u64 = 8 << 20;
/// The kernel is called at most this many lines after its memory is allocated.
const MOST_LINES: usize = 1_000;

/// The file that was read last, because allocations of one file follow each other.
#[derive(Debug, Default)]
pub(super) struct CompiledCode {
    file: String,
    text: String,
}

impl CompiledCode {
    /// Sets the function of the frame to the name of the kernel, if the frame is in such a file.
    pub(super) fn name_kernel(&mut self, frame: &mut Frame) {
        if let Some(kernel) = self.kernel(frame) {
            frame.function = Some(kernel.to_owned());
        }
    }

    fn kernel(&mut self, frame: &Frame) -> Option<&str> {
        let file = frame.file.as_ref().filter(|_| frame.is_of_torch_compile())?;
        if self.file != *file {
            self.file.clone_from(file);
            self.text = read(file).unwrap_or_default();
        }
        kernel(&self.text, frame.line?)
    }
}

fn read(file: &str) -> Option<String> {
    // Opening a pipe would block until it has a writer.
    if !std::fs::metadata(file).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(file).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the kernel that is called on this line, or else the first one that gets the buffer allocated there.
fn kernel(code: &str, line: u32) -> Option<&str> {
    let mut lines = code.lines().skip(usize::try_from(line).ok()?.checked_sub(1)?);
    let allocating = lines.next()?;
    called(allocating).or_else(|| {
        let (buffer, _) = allocating.trim().split_once(" = empty_strided_")?;
        let is_name = |sign: char| sign.is_alphanumeric() || sign == '_';
        let is_given = |line: &&str| line.split(|sign| !is_name(sign)).any(|word| word == buffer);
        lines.take(MOST_LINES).filter(is_given).find_map(called)
    })
}

/// Returns the kernel or operator: `triton_poi_fused_gelu_0.run(…)`, `extern_kernels.mm(…)`, `buf7 =
/// torch.ops.aten.sort.stable(…)`.
fn called(line: &str) -> Option<&str> {
    let (function, _) = line.split_once('(')?;
    let function = function.rsplit(' ').next()?;
    let operator = || function.strip_prefix("extern_kernels.").or_else(|| function.strip_prefix("torch.ops."));
    function.strip_suffix(".run").or_else(operator)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a file that PyTorch 2.11 generated.
    const CODE: &str = "\
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((64, 128), (128, 1), torch.float32)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
            extern_kernels.addmm(primals_3, primals_1, reinterpret_tensor(primals_2, (1, 2), (1, 1), 0), out=buf0)
            buf1 = empty_strided_cuda((64, 128), (128, 1), torch.float32)
            buf10 = empty_strided_cuda((64, 128), (128, 1), torch.bool)
            stream0 = get_raw_stream(0)
            triton_poi_fused_gelu_0.run(buf0, buf10, 8192, stream=stream0)
            triton_poi_fused_mul_1.run(buf10, buf1, 8192, stream=stream0)
            buf2 = torch.ops.aten._efficient_attention.default(buf0, buf1)
            buf3 = buf2[0]
            assert_size_stride(buf3, (64, 128), (128, 1))
            buf4 = empty_strided_cuda((64, 128), (128, 1), torch.float32)
";

    #[test]
    fn an_allocation_has_the_name_of_the_kernel_that_gets_it() {
        let kernels: Vec<_> = (0..16).map(|line| kernel(CODE, line)).collect();
        let mut expected = [None; 16];
        expected[2] = Some("addmm");
        expected[4] = Some("addmm");
        // `buf10` is not `buf1`.
        expected[5] = Some("triton_poi_fused_mul_1");
        expected[6] = Some("triton_poi_fused_gelu_0");
        expected[8] = Some("triton_poi_fused_gelu_0");
        expected[9] = Some("triton_poi_fused_mul_1");
        expected[10] = Some("aten._efficient_attention.default");
        assert_eq!(kernels, expected);
    }

    #[test]
    fn only_files_of_torch_compile_are_read() {
        let mut code = CompiledCode::default();
        let frame = |file: &str| Frame {
            function: Some("Runner.call".to_owned()),
            file: Some(file.to_owned()),
            line: Some(5),
            ..Frame::default()
        };
        let folder = tempfile::Builder::new().prefix("torchinductor_").tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).into_os_string().into_string().unwrap();
        let [compiled, pipe] = ["c1.py", "pipe.py"].map(file);
        std::fs::write(&compiled, CODE).unwrap();
        let mut named = |file: &str| {
            let mut frame = frame(file);
            code.name_kernel(&mut frame);
            frame.function.unwrap()
        };
        assert_eq!(named(&compiled), "triton_poi_fused_mul_1");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for other in [pipe.as_str(), &file("gone.py"), "/app/train.py"] {
            assert_eq!(named(other), "Runner.call");
        }
    }
}
