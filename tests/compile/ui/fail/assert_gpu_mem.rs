use gpumem::assert_gpu_mem;

fn main() {
    assert_gpu_mem!(peak < "2 parsecs", {});
    assert_gpu_mem!(peek < "2 GiB", {});
    assert_gpu_mem!(peak = "2 GiB", {});
    assert_gpu_mem!(peak < "2 GiB");
    assert_gpu_mem!(peak < "2 GiB", {}, used == 0);
    assert_gpu_mem!({});
    assert_gpu_mem!();
    assert_gpu_mem!(leaks == "2 GiB", {});
    assert_gpu_mem!("2 GiB" > peak, {});
    let _: u32 = assert_gpu_mem!(used == 0, { "text" });
}
